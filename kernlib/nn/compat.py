"""The functions and layers of KSMM under their names and with the order of its arguments.

``vsize`` is gone, as kernels choose the width of their loads themselves. A dtype of None is torch's
default, where KSMM has float16. What takes a factor in KSMM's storage names the algorithm that
stores it so:

| algo | storage of a weight (a, b, c, d) |
|---|---|
| kernel | (a*d*c, b) |
| bmm | (a*d, b, c) |
| einsum | (a, b, c, d) |
| dense, sparse | (a*b*d, a*c*d), the latter in CSR |
| bsr | (a*d*b, a*d*c), the blocks of bmm along the diagonal, in BSR; in CSR if gcd(b, c) is 1 |
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kernlib.descriptors.base import check_flag, shown
from kernlib.families.kronecker_sparse import reference
from kernlib.families.kronecker_sparse.descriptor import MOST, KroneckerSparse
from kernlib.nn.kronecker_sparse import DTYPES, KSLinear, checked_device, flatten_bias
from kernlib.nn.kronecker_sparse_algorithms import (
    ALGORITHMS,
    STORAGE,
    Pattern,
    autocasts,
    bmm,
    nearest_factor,
)
from kernlib.runtime.tensors import check_dense

FORMATS = ("kernel", *ALGORITHMS)
VERSIONS = ("torch_matmul", "einsum")
COMPRESSED = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)


# Factors.


def generate_factor(
    a: int,
    b: int,
    c: int,
    d: int,
    algo: str,
    weights: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> torch.Tensor:
    """A factor of the pattern (``a``, ``b``, ``c``, ``d``) in the storage of ``algo``: of
    ``weights`` (a, b, c, d), or uniform in ``±1/sqrt(c)``. ``dtype`` and ``device`` are those of
    ``weights`` or torch's defaults.

    Raises ValueError for another ``algo``, for sizes below 1 and for weights of another shape,
    TypeError for what is no int, tensor or dtype.

    Example:
        >>> kl.nn.compat.generate_factor(2, 4, 3, 2, "kernel").shape  # (a*d*c, b)
        torch.Size([12, 4])
    """
    _check_format(algo)
    pattern = _checked_pattern((a, b, c, d))
    if weights is not None:
        _check_shape("weights", weights, [pattern])
        weights = [weights]
    layer = KSLinear([pattern], weights, bias=False, dtype=dtype, device=device)
    weight = layer.factors[0].detach()
    if algo == "kernel":
        return weight.permute(0, 3, 2, 1).reshape(a * d * c, b)
    return STORAGE[algo](weight) if algo in STORAGE else weight


def to_abcd(factor: torch.Tensor, pattern: Pattern, algo: str) -> torch.Tensor:
    """The weight (a, b, c, d) of a ``factor`` in the storage of ``algo``, as KSMM's checkpoints
    have it, for its ``pattern`` (a, b, c, d): what :class:`KSLinear` takes. Differentiable but for
    sparse and bsr.

    Raises ValueError for a factor that is not in that storage, TypeError for what is no tensor or
    pattern.

    Example:
        >>> factor = kl.nn.compat.generate_factor(2, 4, 3, 2, "kernel")
        >>> weight = kl.nn.compat.to_abcd(factor, (2, 4, 3, 2), "kernel")
        >>> kl.nn.KSLinear([(2, 4, 3, 2)], weights=[weight]).weight.shape
        torch.Size([16, 12])
    """
    _check_format(algo)
    a, b, c, d = pattern = _checked_pattern(pattern)
    compressed = algo in ("dense", "sparse", "bsr")
    _check_shape("factor", factor, _stored_shapes(pattern, algo), compressed)
    if factor.is_floating_point() and factor.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"factor must be one of {names}, got {factor.dtype}")
    if algo == "kernel":
        return factor.reshape(a, d, c, b).permute(0, 3, 2, 1)
    if algo == "bsr":
        factor = factor.to_dense().reshape(a * d, b, a * d, c).diagonal(0, 0, 2).permute(2, 0, 1)
    if algo in ("bmm", "bsr"):
        return factor.reshape(a, d, b, c).permute(0, 2, 3, 1)
    if algo == "einsum":
        return factor
    return nearest_factor(factor.to_dense(), pattern)


def from_abcd_to_dense(factor: torch.Tensor) -> torch.Tensor:
    """The matrix (a*b*d, a*c*d) of a weight ``factor`` (a, b, c, d). Raises TypeError for what is
    no tensor, ValueError for one of other dimensions.

    Example:
        >>> kl.nn.compat.from_abcd_to_dense(torch.ones(2, 1, 2, 1))
        tensor([[1., 1., 0., 0.],
                [0., 0., 1., 1.]])
    """
    check_dense(("factor",), factor=factor)
    if factor.dim() != 4:
        raise ValueError(f"factor must have shape (a, b, c, d), got {tuple(factor.shape)}")
    return reference.dense(tuple(factor.shape), factor)


def from_kernel_format_to_dense(factor: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The matrix (a*b*d, a*c*d) of a ``factor`` in the storage of the kernel, (a*d*c, b), and its
    ``pattern`` (a, b, c, d). Raises ValueError for a factor of another shape, TypeError for what is
    no tensor or pattern.

    Example:
        >>> kl.nn.compat.from_kernel_format_to_dense(torch.tensor([[1.0], [2.0]]), (1, 1, 2, 1))
        tensor([[1., 2.]])
    """
    return reference.dense(pattern, to_abcd(factor, pattern, "kernel"))


def from_bmm_format_to_dense(factor: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The matrix (a*b*d, a*c*d) of a ``factor`` in the storage of bmm, (a*d, b, c) or (a, d, b, c),
    and its ``pattern`` (a, b, c, d). Raises ValueError for a factor of another shape, TypeError for
    what is no tensor or pattern.

    Example:
        >>> kl.nn.compat.from_bmm_format_to_dense(torch.tensor([[[1.0, 2.0]]]), (1, 1, 2, 1))
        tensor([[1., 2.]])
    """
    return reference.dense(pattern, to_abcd(factor, pattern, "bmm"))


def bmm_bs_first(x: torch.Tensor, w_kron: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """``x`` (..., a*c*d) to (..., a*b*d) by a factor ``w_kron`` in the storage of bmm, of
    ``pattern`` (a, b, c, d). Raises ValueError for other shapes, TypeError for two dtypes and what
    is no tensor or pattern.

    Example:
        >>> factor = kl.nn.compat.generate_factor(2, 4, 3, 2, "bmm")
        >>> kl.nn.compat.bmm_bs_first(torch.randn(5, 12), factor, (2, 4, 3, 2)).shape
        torch.Size([5, 16])
    """
    return _by_bmm(x, w_kron, pattern, batch_last=False)


def bmm_bs_last(x: torch.Tensor, w_kron: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """``x`` (a*c*d, ...) to (a*b*d, ...) by a factor ``w_kron`` in the storage of bmm, of
    ``pattern`` (a, b, c, d). Raises as :func:`bmm_bs_first` does.

    Example:
        >>> factor = kl.nn.compat.generate_factor(2, 4, 3, 2, "bmm")
        >>> kl.nn.compat.bmm_bs_last(torch.randn(12, 5), factor, (2, 4, 3, 2)).shape
        torch.Size([16, 5])
    """
    return _by_bmm(x, w_kron, pattern, batch_last=True)


def _by_bmm(x, w_kron, pattern: Pattern, batch_last: bool) -> torch.Tensor:
    a, b, c, d = pattern = _checked_pattern(pattern)
    _check_shape("w_kron", w_kron, _stored_shapes(pattern, "bmm"))
    check_dense(("x",), x=x)
    if x.dim() == 0 or x.shape[0 if batch_last else -1] != a * c * d:
        expected = f"({a * c * d}, ...)" if batch_last else f"(..., {a * c * d})"
        raise ValueError(f"x must have shape {expected}, got {tuple(x.shape)}")
    if x.dtype != w_kron.dtype:
        raise TypeError(f"x and w_kron must have one dtype, got {x.dtype} and {w_kron.dtype}")
    return bmm(x, None, pattern, batch_last, w_kron.reshape(a * d, b, c))


def _check_format(algo: str) -> None:
    if not isinstance(algo, str) or algo not in FORMATS:
        raise ValueError(f"algo must be one of {', '.join(FORMATS)}, got {shown(algo)}")


def _checked_pattern(pattern) -> Pattern:
    """Raises TypeError and ValueError that name the size."""
    sizes = tuple(pattern) if isinstance(pattern, Sequence) else ()
    if len(sizes) != 4:
        raise TypeError(f"pattern must be four ints (a, b, c, d), got {shown(pattern)}")
    return KroneckerSparse(*map(_as_int, sizes)).pattern


def _as_int(size):
    """An int of another type, such as numpy's, as Python's; others as they are."""
    try:
        return size if isinstance(size, bool) else operator.index(size)
    except (TypeError, RuntimeError):
        return size


def _stored_shapes(pattern: Pattern, algo: str) -> list[tuple[int, ...]]:
    """The shapes of a factor in the storage of an algorithm."""
    a, b, c, d = pattern
    return {
        "kernel": [(a * d * c, b)],
        "bmm": [(a * d, b, c), (a, d, b, c)],
        "einsum": [pattern],
        "bsr": [(a * d * b, a * d * c)],
    }.get(algo, [(a * b * d, a * c * d)])


def _check_shape(
    name: str, tensor, shapes: list[tuple[int, ...]], compressed: bool = False
) -> None:
    is_compressed = compressed and isinstance(tensor, torch.Tensor) and tensor.layout in COMPRESSED
    if not is_compressed:
        check_dense((name,), **{name: tensor})
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")


# Layers.


class LinearBsl(nn.Linear):
    """``nn.Linear`` with the batch last: (in_features, ...) to (out_features, ...).

    - ``in_features``, ``out_features``, ``bias``, ``device``, ``dtype``: as those of ``nn.Linear``.
      The bias is (out_features,), and one of (out_features, 1) is loaded too.
    - ``version``: ``"torch_matmul"`` or ``"einsum"``.
    - ``weights`` (out_features, in_features): copied, with their dtype and device by default.

    Raises ValueError for another version and for sizes and weights that do not fit, TypeError for
    arguments of other kinds.

    Example:
        >>> kl.nn.compat.LinearBsl(3, 2)(torch.randn(3, 5)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        version: str = "torch_matmul",
        weights: torch.Tensor | None = None,
    ):
        if not isinstance(version, str) or version not in VERSIONS:
            raise ValueError(f"version must be one of {', '.join(VERSIONS)}, got {shown(version)}")
        _check_layer(in_features, out_features, bias, weights)
        super().__init__(in_features, out_features, bias, *_placed(weights, device, dtype))
        self.version = version
        _set_weight(self, weights)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(in_features, ...) to (out_features, ...). Raises TypeError for what is no tensor,
        ValueError for one of another shape."""
        _check_input(self, input, 0)
        if self.version == "einsum":
            product = torch.einsum("oi,i...->o...", self.weight, input)
        else:
            flat = self.weight @ input.reshape(self.in_features, -1)
            product = flat.reshape(self.out_features, *input.shape[1:])
        if self.bias is None:
            return product
        return product + self.bias.to(product.dtype).view(-1, *[1] * (product.dim() - 1))

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        flatten_bias(state_dict, prefix, self.out_features)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class UnfusedLinear(nn.Linear):
    """``nn.Linear`` whose bias is added in an operation of its own.

    - ``in_features``, ``out_features``, ``bias``, ``device``, ``dtype``: as those of ``nn.Linear``.
    - ``weights`` (out_features, in_features): copied, with their dtype and device by default.

    Raises ValueError for sizes and weights that do not fit, TypeError for arguments of other kinds.

    Example:
        >>> kl.nn.compat.UnfusedLinear(3, 2)(torch.randn(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        weights: torch.Tensor | None = None,
    ):
        _check_layer(in_features, out_features, bias, weights)
        super().__init__(in_features, out_features, bias, *_placed(weights, device, dtype))
        _set_weight(self, weights)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features). Raises TypeError for what is no tensor,
        ValueError for one of another shape."""
        _check_input(self, input, -1)
        product = F.linear(input, self.weight)
        return product if self.bias is None else product + self.bias.to(product.dtype)


def get_linear_layer(
    patterns: Sequence[Pattern],
    algo: str = "auto",
    dtype: torch.dtype | None = None,
    bs_last: bool = False,
    bias: bool = False,
    weights: Sequence[torch.Tensor] | None = None,
    device: torch.device | str | int | None = None,
    **others: Any,
) -> nn.Module:
    """A :class:`KSLinear`, drawn as KSMM draws it (``init="ksmm"``); or for one dense pattern
    (1, out, in, 1) with ``algo="nn_linear"`` an ``nn.Linear``, with ``"unfused_linear"`` an
    :class:`UnfusedLinear` or, ``bs_last``, a :class:`LinearBsl`, for which ``weights`` holds one
    matrix (out, in).

    - ``patterns``, ``algo``, ``dtype``, ``bs_last``, ``bias``, ``device``: as those of
      :class:`KSLinear`.
    - ``others``: refused by name, KSMM's ``vsize`` among them.

    Raises TypeError for ``vsize`` and other arguments that it does not take; ValueError for what
    :class:`KSLinear` refuses, and for ``nn_linear`` with ``bs_last`` or another pattern.

    Example:
        >>> kl.nn.compat.get_linear_layer([(1, 8, 12, 1)], "unfused_linear", bs_last=True)
        LinearBsl(in_features=12, out_features=8, bias=False)
    """
    if "vsize" in others or type(bias) is not bool:
        raise TypeError(
            "vsize is gone: kernels choose the width of their loads themselves; leave it out, and "
            f"give what follows it by name (bias got {shown(bias)})"
        )
    if others:
        raise TypeError(f"get_linear_layer takes no argument {', '.join(others)}")
    if algo not in ("nn_linear", "unfused_linear"):
        return KSLinear(patterns, weights, bias, algo, dtype, bs_last, device=device, init="ksmm")
    check_flag("bs_last", bs_last)
    out_features, in_features = _dense_sizes(patterns, algo)
    if algo == "nn_linear" and bs_last:
        raise ValueError("algo='nn_linear' has the batch first; use 'unfused_linear' for bs_last")
    kind = nn.Linear if algo == "nn_linear" else LinearBsl if bs_last else UnfusedLinear
    weight = None if weights is None else _only(weights)
    device, dtype = _placed(weight, device, dtype)
    layer = kind(in_features, out_features, bias, device=device, dtype=dtype)
    _set_weight(layer, weight)
    return layer


def _dense_sizes(patterns, algo: str) -> tuple[int, int]:
    if not isinstance(patterns, Sequence) or len(patterns) != 1:
        raise ValueError(f"algo={algo!r} needs one pattern (1, out, in, 1), got {shown(patterns)}")
    a, b, c, d = _checked_pattern(patterns[0])
    if a != 1 or d != 1:
        raise ValueError(f"algo={algo!r} needs one pattern (1, out, in, 1), got {shown(patterns)}")
    return b, c


def _only(weights) -> torch.Tensor:
    if not isinstance(weights, Sequence) or len(weights) != 1:
        raise ValueError(f"weights must hold one matrix (out, in), got {shown(weights)}")
    check_dense(("weights[0]",), **{"weights[0]": weights[0]})
    return weights[0]


def _check_layer(in_features, out_features, bias, weights) -> None:
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if isinstance(size, bool) or not isinstance(_as_int(size), int):
            raise TypeError(f"{name} must be an int, got {shown(size)}")
        if not 0 <= size < MOST:
            raise ValueError(f"{name} must be from 0 to below 2**60, got {shown(size)}")
    check_flag("bias", bias)
    check_dense((), weights=weights)


def _check_input(layer: nn.Linear, input, axis: int) -> None:
    check_dense(("input",), input=input)
    if input.dim() == 0 or input.shape[axis] != layer.in_features:
        expected = f"({layer.in_features}, ...)" if axis == 0 else f"(..., {layer.in_features})"
        raise ValueError(f"input must have shape {expected}, got {tuple(input.shape)}")
    if input.dtype != layer.weight.dtype and not autocasts(input.device):
        raise TypeError(
            f"input must be {layer.weight.dtype} as the layer's weight is, got {input.dtype}"
        )


def _placed(weights: torch.Tensor | None, device, dtype) -> tuple:
    """Device and dtype of a layer, by default the weights'."""
    device = checked_device(device)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {shown(dtype)}")
    if dtype is not None and dtype not in DTYPES and not dtype.is_complex:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if weights is None:
        return device, dtype
    if dtype is None and weights.dtype in DTYPES:  # others are copied into torch's default
        dtype = weights.dtype
    return weights.device if device is None else device, dtype


def _set_weight(layer: nn.Linear, weights: torch.Tensor | None) -> None:
    if weights is None:
        return
    if weights.is_meta and not layer.weight.is_meta:
        raise ValueError(f"weights must have values for a layer on {layer.weight.device}, got meta")
    if weights.shape != layer.weight.shape:
        raise ValueError(
            f"weights must have shape {tuple(layer.weight.shape)}, got {tuple(weights.shape)}"
        )
    with torch.no_grad():
        layer.weight.copy_(weights)
