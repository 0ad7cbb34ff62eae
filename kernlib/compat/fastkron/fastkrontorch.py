"""FastKron's functions of torch tensors, in place of ``pyfastkron.fastkrontorch``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernlib.families.kronecker_product.matmul import kron_matmul
from kernlib.runtime.tensors import broadcast_shapes, check_dense, check_out_shape

__all__ = ["KMM", "MKM", "gekmm", "gemkm"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def gemkm(
    x: torch.Tensor,
    fs: Sequence[torch.Tensor],
    alpha: float | torch.Tensor = 1.0,
    beta: float | torch.Tensor = 0.0,
    y: torch.Tensor | None = None,
    *,
    precision: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``alpha * x (F1 ⊗ ... ⊗ FN) + beta * y``.

    - ``x`` (..., M, K) or (K,), K the product of all P; the result is (..., M, L) or (..., L), L
      the product of all Q.
    - ``fs``: a list or tuple of factors (..., P, Q), or (P,) for a single column. Dimensions in
      front of the last two of x and of each factor broadcast.
    - ``y``: broadcasts to the result. With ``beta=0`` it is not read.
    - ``alpha``, ``beta``, ``precision``, ``out``, dtypes and gradients: as those of
      :func:`kernlib.kron_matmul`.

    Raises ValueError for shapes that do not fit, no factors, a mixture of dtypes or devices, and a
    ``beta`` without y; TypeError for what is no tensor and for other dtypes; RuntimeError for an
    ``out`` while gradients are recorded.
    """
    return _product("right", x, fs, y, out, alpha=alpha, beta=beta, precision=precision)


def gekmm(
    fs: Sequence[torch.Tensor],
    x: torch.Tensor,
    alpha: float | torch.Tensor = 1.0,
    beta: float | torch.Tensor = 0.0,
    y: torch.Tensor | None = None,
    *,
    precision: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``alpha * (F1 ⊗ ... ⊗ FN) x + beta * y``.

    - ``fs``: a list or tuple of factors (..., Q, P), or (P,) for a single row.
    - ``x`` (..., K, M) or (K,), K the product of all P; the result is (..., L, M) or (..., L), L
      the product of all Q.

    - ``alpha``, ``beta``, ``y``, ``precision``, ``out``: as in :func:`gemkm`.

    Raises what :func:`gemkm` does: ValueError for shapes that do not fit, TypeError for other
    dtypes, RuntimeError for an ``out`` while gradients are recorded.
    """
    return _product("left", x, fs, y, out, alpha=alpha, beta=beta, precision=precision)


class MKM:
    """:func:`gemkm` with the name and call of FastKron's autograd function. PyTorch records the
    product itself, so that gradients have gradients, and there is no ``forward`` or ``backward``
    here to call."""

    @staticmethod
    def apply(x: torch.Tensor, *fs: torch.Tensor) -> torch.Tensor:
        """``x (F1 ⊗ ... ⊗ FN)`` of x and the factors ``fs``. Raises as :func:`gemkm` does."""
        return gemkm(x, fs)


class KMM:
    """:func:`gekmm` with the name and call of FastKron's autograd function, as :class:`MKM` is."""

    @staticmethod
    def apply(x: torch.Tensor, *fs: torch.Tensor) -> torch.Tensor:
        """``(F1 ⊗ ... ⊗ FN) x`` of x, which comes first here too, and the factors ``fs``. Raises as
        :func:`gekmm` does."""
        return gekmm(fs, x)


def _product(side: str, x, fs, y, out, **scales) -> torch.Tensor:
    _check_kinds(x, fs, y, out)
    lone = -1 if side == "right" else 0  # the dimension that a factor of one dimension lacks
    matrices = [f.unsqueeze(lone) if f.dim() == 1 else f for f in fs]
    shape = _result_shape(side, x, matrices)
    if any(f.dim() > 1 for f in fs):
        _check_summand(y, shape)
        return kron_matmul(x, matrices, y=y, side=side, out=out, **scales)
    axis = -1 if side == "right" or x.dim() == 1 else -2  # of the result, of size 1
    squeezed = shape[:axis] + shape[len(shape) + axis + 1 :]
    _check_summand(y, squeezed)
    if y is not None and y.dim() > -1 - axis:
        y = y.unsqueeze(axis)
    if out is None:
        return kron_matmul(x, matrices, y=y, side=side, **scales).squeeze(axis)
    check_out_shape(out, squeezed)
    kron_matmul(x, matrices, y=y, side=side, out=out.unsqueeze(axis), **scales)
    return out


def _check_kinds(x, fs, y, out) -> None:
    """Tensors of one known dtype and one device. Raises ValueError and TypeError."""
    check_dense(("x",), x=x, y=y, out=out)
    if not isinstance(fs, (list, tuple)):
        raise TypeError(f"fs must be a list or tuple of factors, got {type(fs).__name__}")
    if not fs:
        raise ValueError("fs must hold at least one factor, got none")
    factors = {f"fs[{index}]": factor for index, factor in enumerate(fs)}
    check_dense(tuple(factors), **factors)
    if x.dtype not in DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"x must be one of {dtypes}, got {x.dtype}")
    cast = torch._C._is_any_autocast_enabled()  # to one dtype
    for name, tensor in (factors if y is None else factors | {"y": y}).items():
        if tensor.dtype != x.dtype and not cast:
            raise ValueError(f"{name} must be {x.dtype} as x is, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} as x is, got {tensor.device}")


def _result_shape(side: str, x: torch.Tensor, matrices: list[torch.Tensor]) -> tuple[int, ...]:
    """The shape of a product whose sizes fit; they may be symbols. Raises ValueError."""
    for index, factor in enumerate(matrices):
        if factor.dim() == 0 or 0 in factor.shape[-2:]:
            raise ValueError(
                f"fs[{index}] must be a matrix, a batch of them or a vector, with sizes above 0, "
                f"got shape {tuple(factor.shape)}"
            )
    p, q = (-2, -1) if side == "right" else (-1, -2)
    features = math.prod([factor.shape[p] for factor in matrices])
    width = math.prod([factor.shape[q] for factor in matrices])
    if x.dim() == 0 or x.shape[-1 if x.dim() == 1 else q] != features:
        end = f"{features})" if side == "right" else f"{features}, M)"
        raise ValueError(
            f"x must have shape ({features},) or (..., {end} for these factors, got "
            f"{tuple(x.shape)}"
        )
    batch = _batch(x.shape[:-2], [factor.shape[:-2] for factor in matrices])
    if x.dim() == 1:
        return (*batch, width)
    return (*batch, x.shape[-2], width) if side == "right" else (*batch, width, x.shape[-1])


def _batch(of_x: torch.Size, of_factors: list[torch.Size]) -> tuple[int, ...]:
    """What the dimensions in front broadcast to. Raises ValueError."""
    if not any(of_factors):
        return tuple(of_x)
    try:
        return broadcast_shapes(of_x, *of_factors)
    except RuntimeError:
        raise ValueError(
            "dimensions in front of the last two must broadcast, got "
            f"{tuple(of_x)} of x and {[tuple(batch) for batch in of_factors]} of fs"
        ) from None


def _check_summand(y: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a y that does not broadcast to the result."""
    if y is None:
        return
    sizes = zip(reversed(y.shape), reversed(shape), strict=False)
    if y.dim() > len(shape) or any(length not in (1, size) for length, size in sizes):
        raise ValueError(f"y must broadcast to {shape}, got shape {tuple(y.shape)}")
