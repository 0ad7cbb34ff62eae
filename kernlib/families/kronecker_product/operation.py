"""Products with Kronecker products, as they are called."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.compiler import is_dynamo_compiling

from kernlib import events
from kernlib import run as front
from kernlib.families.kronecker_product import checks
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.product import PRODUCT, calls
from kernlib.run import run_kernel
from kernlib.runtime import products
from kernlib.runtime.arguments import check_same_kind, refuse_out_of_recorded
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import check_host, check_tensor, host_value, on_device
from kernlib.runtime.operation import by_operator
from kernlib.runtime.tensors import check_dense, check_flag, check_out_shape, stand_ins


def _recorded(*request) -> torch.Tensor:
    _, operands, out, _ = request
    refuse_out_of_recorded(out)
    if stand_ins(*operands):
        return by_operator(PRODUCT, request)
    checks.check_call(*request)
    return products.by_reference(PRODUCT, *request)


_run_matrix = products.front_door(PRODUCT, calls, _recorded)


def run(descriptor: KroneckerProduct, *operands, out=None, **parameters) -> torch.Tensor:
    """A call of :func:`kernlib.run_kernel`; a vector is one row or column."""
    if operands and isinstance(operands[0], torch.Tensor) and operands[0].dim() == 1:
        return _run_vector(descriptor, operands, out, parameters)
    return _run_matrix(descriptor, *operands, out=out, **parameters)


def _run_vector(descriptor: KroneckerProduct, operands: tuple, out, parameters: dict):
    checks.check_kinds(descriptor, operands)
    other = -3 - descriptor.axis  # the dimension that the vector lacks
    operands = operands[0].unsqueeze(other), *operands[1:]
    written = None
    if out is not None:
        check_dense((), out=out)
        shape = list(checks.check_operands(descriptor, operands))
        del shape[other]
        check_out_shape(out, tuple(shape))
        written = out.unsqueeze(other)
    y = _run_matrix(descriptor, *operands, out=written, **parameters)
    return y.squeeze(other) if out is None else out


def kron_matmul(
    x: torch.Tensor,
    factors: Sequence[torch.Tensor],
    *,
    alpha: float | torch.Tensor = 1.0,
    beta: float | torch.Tensor = 0.0,
    y: torch.Tensor | None = None,
    side: str = "right",
    precision: str | None = None,
    out: torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """``alpha * x (F1 ⊗ ... ⊗ FN) + beta * y``, or ``alpha * (F1 ⊗ ... ⊗ FN) x + beta * y`` with
    ``side="left"``: the factors stand on the right or on the left of x. Their product is never
    made.

    - ``x`` (..., M, in) with the factors on the right, (..., in, M) on the left; of one dimension,
      it is one row or column, and so is the result.
    - ``factors``: matrices ``F_i`` (..., rows_i, columns_i), rectangular and distinct as they may
      be, in any number; ``in`` is the product of all rows, ``out`` that of all columns, on the left
      the other way round. A transposed view is read where it lies. Dimensions in front of the last
      two of x and of each factor broadcast as those of ``torch.matmul`` do.
    - ``y``: broadcasts to the result. With ``beta=0`` it is not read, and may hold NaN.
    - ``alpha``, ``beta``: real numbers, or tensors of shape () that stay on their device.
    - float32, float16, bfloat16 or float64, one for all tensors; half types are computed in
      float32 and rounded once. ``precision`` as for :class:`kernlib.KroneckerProduct`.
    - ``out``: the result's shape and dtype, any strides; it may be y. Nothing is recorded then.

    Gradients of x, the factors, y, alpha and beta are recorded, and those of the gradients.

    Raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded. The operation is ``gemkm`` and ``gekmm`` of the FastKron project; its
    shuffle algorithm is of Fackler, "Algorithm 993", ACM TOMS 45 (2019).
    """
    if debug is not False:
        check_flag("debug", debug)
        with events.on_stderr():
            options = {"side": side, "precision": precision, "out": out}
            return kron_matmul(x, factors, alpha=alpha, beta=beta, y=y, **options)
    check_dense(("x",), x=x, y=y, out=out)
    scale, share = _number("alpha", alpha), _number("beta", beta)
    if y is None and share != 0:
        raise ValueError("beta says how much of y is added, and no y is given")
    if scale == 1 and y is None:
        return _product(x, factors, side, precision, out)
    dtype = x.dtype
    if torch._C._is_any_autocast_enabled():  # which casts them itself
        dtype = None
    elif accumulator(dtype) != dtype:
        check_factors(factors)
        x, factors = _widened(x, factors)
    made = _product(x, factors, side, precision, None)
    made = _with(made, None if scale == 1 else alpha, None if share == 0 else beta, y)
    return _written(made if dtype is None else made.to(dtype), out)


def _product(x: torch.Tensor, factors, side: str, precision: str | None, out) -> torch.Tensor:
    if not is_dynamo_compiling():
        return run_kernel(descriptor_of(factors, side, precision), x, *factors, out=out)
    check_factors(factors)
    # Which makes the descriptor where it knows sizes that are symbols here.
    made = front.kronecker_product_operators.product(side, precision, x, *factors)
    return _written(made, out)


def _widened(x: torch.Tensor, factors) -> tuple:
    """Operands in the arithmetic's dtype, so that the result is rounded once."""
    for index, factor in enumerate(factors):
        check_same_kind("x", x, f"factors[{index}]", factor, checks.TYPES)
    wide = accumulator(x.dtype)
    return x.to(wide), [factor.to(wide) for factor in factors]


def _with(made: torch.Tensor, alpha, beta, y: torch.Tensor | None) -> torch.Tensor:
    """``alpha * made + beta * y``; None for an alpha of 1, and for a beta of 0."""
    if alpha is not None:
        made = made * _on(made, "alpha", alpha)
    if y is None:
        return made
    _check_summand(y, made)
    if beta is None:
        return made
    beta = _on(made, "beta", beta)
    if isinstance(beta, torch.Tensor):  # whose 0 takes nothing from what is not finite
        y = torch.where((beta == 0) & ~y.isfinite(), 0.0, y)
    return made + beta * y.to(made.dtype)


def _check_summand(y: torch.Tensor, made: torch.Tensor) -> None:
    if not y.is_floating_point():
        raise TypeError(f"y must be {made.dtype} as x is, got {y.dtype}")
    if y.device != made.device:
        raise ValueError(f"y must be on the device of x, {made.device}, got {y.device}")
    sizes = zip(reversed(y.shape), reversed(made.shape), strict=False)
    if y.dim() > made.dim() or any(own not in (1, size) for own, size in sizes):
        raise ValueError(f"y must broadcast to {tuple(made.shape)}, got {tuple(y.shape)}")


def _number(name: str, value) -> float | None:
    """A number that a call may be scaled by, None for a tensor. Raises ValueError and TypeError."""
    number = host_value(name, value, 0)
    if number is None:
        check_tensor(name, value, frozenset(), dimensions=0)
    else:
        check_host(name, number, frozenset())
    return number


def _on(made: torch.Tensor, name: str, value):
    if not isinstance(value, torch.Tensor):
        return float(value)
    return on_device(name, value, made.device, made.dtype)


def _written(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return made
    if made.requires_grad or (torch.is_grad_enabled() and out.requires_grad):
        refuse_out_of_recorded(out)
    check_out_shape(out, tuple(made.shape))
    if out.dtype != made.dtype:
        raise TypeError(f"out must be {made.dtype} as x is, got {out.dtype}")
    return out.copy_(made)


def check_factors(factors) -> None:
    """Raises TypeError for what is no sequence of dense tensors, ValueError for one that holds
    none."""
    if isinstance(factors, torch.Tensor) or not isinstance(factors, Sequence):
        kind = type(factors).__name__
        raise TypeError(f"factors must be a list or tuple of matrices, got {kind}")
    if not factors:
        raise ValueError("factors must hold at least one matrix, got none")
    for index, factor in enumerate(factors):
        name = f"factors[{index}]"
        check_dense((name,), **{name: factor})


def descriptor_of(factors, side: str, precision: str | None) -> KroneckerProduct:
    """What describes the product with these factors. Raises ValueError and TypeError."""
    check_factors(factors)
    shapes = []
    for index, factor in enumerate(factors):
        name, shape = f"factors[{index}]", tuple(factor.shape)
        if len(shape) < 2:
            raise ValueError(f"{name} must be a matrix, got shape {shape}")
        if 0 in shape[-2:]:
            raise ValueError(f"{name} must have sizes above 0, got shape {shape}")
        shapes.append((int(shape[-2]), int(shape[-1])))  # symbols too
    return _descriptor(tuple(shapes), side, precision)


@lru_cache(maxsize=1024)
def _descriptor(shapes: tuple, side: str, precision: str | None) -> KroneckerProduct:
    return KroneckerProduct(shapes, side=side, precision=precision)


RUNS = {KroneckerProduct: run}
