"""Kronecker products as a function of a matrix and its factors, as ``torch.matmul`` is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib import run as front
from kernlib.descriptors.base import check_flag, shown
from kernlib.descriptors.epilogues import Add, Epilogue, Scale
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.run import run_kernel
from kernlib.runtime.arguments import (
    check_broadcast,
    check_out,
    check_same_kind,
    refuse_out_of_recorded,
)
from kernlib.runtime.dtypes import FLOAT_TYPES, accumulator
from kernlib.runtime.expressions import summand
from kernlib.runtime.numbers import check_host, check_kind, check_tensor, host_value, on_device
from kernlib.runtime.products import is_on_gpu, requires_gradient
from kernlib.runtime.tensors import (
    check_dense,
    check_layout,
    check_memory,
    refuse_any_overlap,
    refuse_partial_overlap,
    stand_ins,
)

if TYPE_CHECKING:
    from kernlib.distributed.communicator import Group

# The epilogues by which kernels compute alpha times a product, and add beta times y to that.
SCALED = (Scale("alpha"),)
ADDED = (*SCALED, Add())
# The defaults of alpha and beta: of a float Dynamo makes a symbol, which AOTAutograd takes back by
# compiling a first program twice.
_ONE, _ZERO = 1, 0
# What arguments must be that a call over a group of processes has no use for.
_ALONE = {"alpha": 1, "beta": 0, "y": None, "side": "right", "out": None, "debug": False}
_PLAIN = (int, float, str, bool, type(None))


def kron_matmul(
    x: torch.Tensor,
    factors: Sequence[torch.Tensor],
    *,
    alpha: float | torch.Tensor = _ONE,
    beta: float | torch.Tensor = _ZERO,
    y: torch.Tensor | None = None,
    side: str = "right",
    precision: str | None = None,
    out: torch.Tensor | None = None,
    debug: bool = False,
    group: Group = None,
    sharded: str | None = None,
) -> torch.Tensor:
    """``alpha * x (F1 ⊗ ... ⊗ FN) + beta * y``, or ``alpha * (F1 ⊗ ... ⊗ FN) x + beta * y`` with
    ``side="left"``: the factors stand on the right or on the left of x. Their product is never
    made.

    - ``x`` (..., M, in) with the factors on the right, (..., in, M) on the left; of one dimension,
      it is one row or column, and so is the result.
    - ``factors``: matrices ``F_i`` (..., rows_i, columns_i), rectangular and distinct as they may
      be, in any number, as a list, a tuple, an ``nn.ParameterList`` or, of one shape, a tensor that
      stacks them in its first dimension; ``in`` is the product of all rows, ``out`` that of all
      columns, on the left the other way round. A transposed view is read where it lies. Dimensions
      in front of the last two of x and of each factor broadcast as those of ``torch.matmul`` do.
    - ``y``: broadcasts to the result, of any strides. With ``beta=0`` it is not read, and may hold
      NaN.
    - ``alpha``, ``beta``: real numbers, or tensors of shape () that stay on their device.
    - float32, float16, bfloat16 or float64, one for all tensors; sums of half types are float32, on
      GPUs those of one factor may be rounded before the next. ``precision`` as for
      :class:`kernlib.KroneckerProduct`.
    - ``out``: the result's shape and dtype, any strides; it may be y itself, and no part of it.
      Nothing is recorded then.
    - ``debug=True`` writes what runs to stderr.
    - ``group``: of processes that hold a part of x each, as that of
      :func:`kernlib.distributed.kron_matmul`, which is called then; its columns, or with
      ``sharded="rows"`` its rows. x and the factors are matrices then, these on the right, and
      alpha, beta, y, ``out`` and debug are left out.

    Gradients of x, the factors, y, alpha and beta are recorded, and those of the gradients.

    Raises ValueError for shapes and devices that do not fit each other, another side, a beta
    without y, a ``sharded`` without a group and what does not go with one, TypeError for other
    dtypes and kinds of arguments, each naming the argument, and RuntimeError for an ``out`` while
    gradients are recorded. The operation is ``gemkm`` and ``gekmm`` of the FastKron project; its
    shuffle algorithm is of Fackler, "Algorithm 993", ACM TOMS 45 (2019).

    Example:
        >>> f1, f2, x = torch.randn(2, 3), torch.randn(4, 5), torch.randn(6, 8)
        >>> y = kl.kron_matmul(x, [f1, f2], alpha=2.0)
        >>> y.shape, torch.allclose(y, 2 * x @ torch.kron(f1, f2), atol=1e-4)
        (torch.Size([6, 15]), True)
    """
    if group is not None or sharded is not None:
        others = {"alpha": alpha, "beta": beta, "y": y, "side": side, "out": out, "debug": debug}
        return _of_group(x, factors, group, sharded, precision, others)
    if not _is_plain(x) or y is not None or out is not None:
        check_dense(("x",), x=x, y=y, out=out)
    factors = as_factors(factors)
    if alpha is _ONE:
        alpha = scale = 1.0
    else:
        scale = _number("alpha", alpha)
    if beta is _ZERO:
        beta = share = 0.0
    else:
        share = _number("beta", beta)
    if y is None and share != 0:
        raise ValueError("beta says how much of y is added, and no y is given")
    if scale == 1 and y is None:
        return _product(x, factors, side, precision, debug, out)
    cast = torch._C._is_any_autocast_enabled()  # which says itself what is computed in what
    if y is not None and not cast:
        check_same_kind("x", x, "y", y, FLOAT_TYPES)
    named = {f"factors[{index}]": factor for index, factor in enumerate(factors)}
    refuse_any_overlap(out, x=x, **named, alpha=alpha, beta=beta)
    refuse_partial_overlap(out, y=y)
    if not cast and _is_fused(x, *factors, alpha, beta, y, out):
        values = {"alpha": alpha} if y is None else {"alpha": alpha, "beta": beta, "y": y}
        descriptor = descriptor_of(factors, side, precision, SCALED if y is None else ADDED)
        return run_kernel(descriptor, x, *factors, out=out, debug=debug, **values)
    dtype, wide = x.dtype, accumulator(x.dtype)
    if wide != dtype and not cast:  # so that the result is rounded once
        for name, factor in named.items():
            check_same_kind("x", x, name, factor, FLOAT_TYPES)
        x, factors = x.to(wide), [factor.to(wide) for factor in factors]
    product = _product(x, factors, side, precision, debug, None)
    product = _with(product, None if scale == 1 else alpha, None if share == 0 else beta, y)
    return _written(product if cast else product.to(dtype), out)


def _of_group(x, factors, group, sharded: str | None, precision, others: dict) -> torch.Tensor:
    """The product over the processes of a group. Raises ValueError for ``others``, arguments of
    ``kron_matmul``, that are not what they are by default."""
    if group is None:
        raise ValueError(
            f"sharded says how x lies over the processes of a group, got {shown(sharded)} and no "
            "group: pass group=kernlib.distributed.Communicator() for all of them"
        )
    plain = {name: value for name, value in others.items() if type(value) in _PLAIN}
    if names := [name for name in others if plain.get(name, ...) != _ALONE[name]]:
        raise ValueError(
            f"{', '.join(names)} cannot go with a group, over which x (F1 ⊗ ... ⊗ FN) alone is "
            "computed: leave it out"
        )
    # By name: that package stands above this one, and calls it.
    spread = import_module("kernlib.distributed.kronecker").kron_matmul
    how = "columns" if sharded is None else sharded
    return spread(x, factors, sharded=how, group=group, precision=precision)


def _product(x, factors, side: str, precision: str | None, debug: bool, out) -> torch.Tensor:
    if not is_dynamo_compiling():
        descriptor = descriptor_of(factors, side, precision)
        return run_kernel(descriptor, x, *factors, out=out, debug=debug)
    if debug is not False:
        check_flag("debug", debug)
    # The operator makes the descriptor, as it knows the sizes, which may be symbols here.
    result = front.kronecker_product_operators.product(side, precision, debug, x, *factors)
    return _written(result, out)


def _is_fused(x: torch.Tensor, *others) -> bool:
    """Whether kernels add alpha, beta and y themselves: in eager calls on a GPU. Records and
    transforms see torch's own operators."""
    if is_dynamo_compiling() or is_in_torch_dispatch_mode() or _is_tracing():
        return False
    if stand_ins(x, *others) or not is_on_gpu(x.device):
        return False
    if forward_ad._current_level >= 0 or _are_functorch_transforms_active():
        return False
    return not (torch.is_grad_enabled() and requires_gradient(others, x))


def _with(made: torch.Tensor, alpha, beta, y: torch.Tensor | None) -> torch.Tensor:
    """``alpha * made + beta * y``; None for an alpha of 1, and for a beta of 0."""
    if alpha is not None:
        made = made * _on(made, "alpha", alpha)
    if y is None:
        return made
    if not y.is_floating_point():
        raise TypeError(f"y must be {made.dtype} as x is, got {y.dtype}")
    check_broadcast(made.shape, "y", y)
    if beta is None:
        return made
    beta = _on(made, "beta", beta)
    return made + beta * summand(y.to(made.dtype), beta)


def _number(name: str, value) -> float | None:
    """A number that a call may be scaled by, None for a tensor. Raises ValueError and TypeError."""
    if type(value) is float and value == value:  # the common case needs no checks
        return value
    number = host_value(name, value, 0)
    if number is not None:
        if is_dynamo_compiling():  # it may be a symbol, which is not compared
            return number
        check_host(name, number, frozenset())
    elif _is_seen(value):
        check_tensor(name, value, frozenset(), dimensions=0)
    else:
        check_kind(name, value, 0)
    return number


def _is_seen(value: torch.Tensor) -> bool:
    """Whether a tensor's value is there to be looked at."""
    if is_dynamo_compiling() or is_in_torch_dispatch_mode() or _is_tracing() or stand_ins(value):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _on(made: torch.Tensor, name: str, value):
    if not isinstance(value, torch.Tensor):
        return float(value)
    return on_device(name, value, made.device, made.dtype)


def _written(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return made
    if made.requires_grad or (torch.is_grad_enabled() and out.requires_grad):
        refuse_out_of_recorded(out)
    check_out(out, made, tuple(made.shape))
    if not is_dynamo_compiling():
        check_memory(out)
    return out.copy_(made)


def as_factors(factors) -> Sequence[torch.Tensor]:
    """The factors one by one: of a list, a tuple, a ParameterList, or a tensor that stacks them.
    Raises TypeError for what is no sequence of dense tensors, ValueError for one that holds
    none."""
    if type(factors) not in (list, tuple):
        factors = _one_by_one(factors)
    if not factors:
        raise ValueError("factors must hold at least one matrix, got none")
    for index, factor in enumerate(factors):
        if not _is_plain(factor):
            name = f"factors[{index}]"
            check_dense((name,), **{name: factor})
    return factors


def _one_by_one(factors) -> Sequence[torch.Tensor]:
    if isinstance(factors, nn.ParameterList):
        return tuple(factors)
    if isinstance(factors, torch.Tensor):
        check_layout("factors", factors)
        if factors.dim() < 3:
            raise TypeError(
                "factors must be a list or tuple of matrices, or a stack (n, rows, columns) of "
                f"them, got one tensor of shape {tuple(factors.shape)}"
            )
        return factors.unbind()
    if not isinstance(factors, Sequence) or isinstance(factors, (str, bytes)):
        kind, advice = type(factors).__name__, ""
        if hasattr(factors, "__array__"):
            advice = ": pass [torch.from_numpy(factor) for factor in factors]"
        elif isinstance(factors, Iterable) and not isinstance(factors, (str, bytes)):
            advice = ": pass list(factors)"
        raise TypeError(f"factors must be a list or tuple of matrices, got {kind}{advice}")
    return factors


def _is_plain(t: object) -> bool:
    """Whether :func:`check_dense` has nothing to say of a tensor: asked without its name."""
    if type(t) is not torch.Tensor or t.layout != torch.strided:
        return False
    return not (t.is_nested or t.is_quantized)


def descriptor_of(
    factors, side: str, precision: str | None, epilogue: tuple[Epilogue, ...] = ()
) -> KroneckerProduct:
    """The descriptor of the product with factors that :func:`as_factors` passes. Raises ValueError
    and TypeError."""
    check_sizes(factors)
    shapes = tuple([(int(factor.shape[-2]), int(factor.shape[-1])) for factor in factors])
    try:
        return _descriptor(shapes, side, precision, epilogue)
    except TypeError:  # unhashable: the cache's message says less
        return KroneckerProduct(shapes, side=side, precision=precision, epilogue=epilogue)


def check_sizes(factors) -> None:
    """Raises ValueError for what is no matrix with rows and columns, or a batch of them."""
    for index, factor in enumerate(factors):
        name, shape = f"factors[{index}]", tuple(factor.shape)
        if len(shape) < 2:
            raise ValueError(f"{name} must be a matrix, got shape {shape}")
        if 0 in shape[-2:]:
            raise ValueError(f"{name} must have sizes above 0, got shape {shape}")


@lru_cache(maxsize=1024)
def _descriptor(shapes: tuple, side: str, precision: str | None, epilogue: tuple):
    return KroneckerProduct(shapes, side=side, precision=precision, epilogue=epilogue)
