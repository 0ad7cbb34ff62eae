"""Products of tensors with compressed matrices: checks of a call, the choice between kernels and
torch, gradients, and the call itself.

CPU tensors, and calls inside transforms of torch.func other than vmap, are computed by the
reference, on the matrix laid out densely.

The gradient of ``W x`` with respect to x is ``W^T grad``. The gradient of that with respect to grad
is a product with W again, and so on to any order. Up to FEW vectors are multiplied by the
compressed transpose, which the matrix makes once and keeps. More vectors, as in training, are
multiplied by the matrix laid out densely, which needs no second compressed copy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.epilogues import Bias, Epilogue, as_epilogues
from kernlib.families.sparse import plans, reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.layout import DTYPES
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.matrix import SparseMatrix, dense_of
from kernlib.families.sparse.tensors import check_frozen, check_unwritten, state_of
from kernlib.run import run_kernel
from kernlib.runtime import autograd, products
from kernlib.runtime.arguments import (
    autocast,
    check_out,
    check_parameters,
    no_autocast,
    parameter_key,
)
from kernlib.runtime.autograd import Parts, Recording, is_biased, is_watched, recorder
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import KERNELS, OPERATOR, REFERENCE, operators_of
from kernlib.runtime.products import Call, front_door
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    check_dense,
    check_memory,
    is_differentiated,
    is_lazy,
    is_wrapped,
    materialised,
    signature,
)

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

PLAIN, BIASED = SparseMatmul(), SparseMatmul((Bias(),))
FEW = 16  # vectors that kernels take at once


# Checks.


def check_call(descriptor: SparseMatmul, operands: tuple, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    w, x = operands
    check_dense(("x",), x=x, out=out)
    shape = check_x(w.shape, w.dtype, w.device, x)
    check_parameters(descriptor, w.shape[0], parameters, x, look=True)
    if out is not None:
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape[:-1]), shape, x.dtype, x.device)


def check_kinds(descriptor: SparseMatmul, operands: tuple) -> None:
    """Raises TypeError for other operands than a compressed matrix and an x."""
    if len(operands) != 2:
        raise TypeError(f"{descriptor.describe()} takes w and x, got {len(operands)} operands")
    w = operands[0]
    if not isinstance(w, SparseMatrix):
        raise TypeError(
            f"w must be a SparseMatrix, as kernlib.sparse.compress makes, got {type(w).__name__}"
        )


def check_x(shape: tuple[int, int], dtype: torch.dtype, device, x: torch.Tensor) -> tuple:
    """The output's shape for x, whose sizes may be symbols, and a matrix of this shape, dtype and
    device. Raises ValueError and TypeError."""
    rows, cols = shape
    if x.dtype not in DTYPES.values():
        raise TypeError(f"x must be one of {', '.join(DTYPES)}, got {x.dtype}")
    if x.dtype != dtype:
        raise TypeError(f"x and w must have one dtype, got {x.dtype} and {dtype}")
    if x.device != device:
        raise ValueError(f"x and w must be on one device, got {x.device} and {device}")
    if x.dim() == 0 or x.shape[-1] != cols:
        raise ValueError(
            f"x must be (..., {cols}) for w of shape {(rows, cols)}, got shape {tuple(x.shape)}"
        )
    return (*x.shape[:-1], rows)


# The product, without autocast and without a record of gradients.


def _key(descriptor: SparseMatmul, operands: tuple, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor; the matrix's layout and device, and whether it is
    frozen; then shapes, strides, dtypes, device, alignment and kinds of numbers. None where there
    can be no plan."""
    try:  # signature(x) written out, which saves 0.1 us
        w, x = operands
        key = (
            descriptor.text, w._key,  # a text, which a str hashes once
            x.shape, x.stride(), x.dtype, x.get_device(),
            p & 15 if (p := x.data_ptr()) >= LOWEST_ADDRESS else ~p, x.is_neg(),
        )  # fmt: skip
        if out is not None:
            key += signature(out)
        if parameters:
            for name, value in parameters.items():
                key += (name, parameter_key(value))
    except UNREADABLE:
        check_kinds(descriptor, operands)
        check_dense(("x",), x=operands[1], out=out)
        return None
    return key


def _way(call: Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    values = (operands[1], out, *parameters.values())
    # Operators that take lists of tensors fail inside of transforms that differentiate.
    if not products.is_on_gpu(call.device) or is_differentiated() or any(map(_is_legacy, values)):
        return REFERENCE
    return OPERATOR if any(map(is_wrapped, values)) else KERNELS


def _is_legacy(value) -> bool:
    """Whether ``is_grads_batched`` made a tensor."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def _reference(descriptor: SparseMatmul, operands: tuple, parameters: dict) -> torch.Tensor:
    w, x = operands
    if w.frozen:
        check_frozen(w)
    return reference.sparse_matmul(descriptor, reference.laid_out(w), x, parameters)


def _tensors(operands: tuple) -> tuple[torch.Tensor, ...]:
    w, x = operands
    return (x, *w.operands)


def _names(operands: tuple) -> tuple[str, ...]:
    return ("x", *(f"w.tensors[{name!r}]" for name in operands[0].tensors))


def _cast(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """x and vectors of the epilogue in the matrix's dtype."""
    w, x = operands
    (x,), parameters = autocast((x,), parameters, w.dtype)
    return (w, x), parameters


PRODUCT = products.Product(
    name="sparse_matmul",
    operators="kernlib.families.sparse.operators",
    key=_key,
    check=check_call,
    way=_way,
    plan=plans.plan,
    reference=_reference,
    tensors=_tensors,
    names=_names,
    check_operands=check_kinds,
    cast=_cast,
)
calls = products.bind(PRODUCT)


def multiply(w: SparseMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``W x + bias``, or ``W x`` if ``bias`` is None, without a record of gradients."""
    if bias is None:
        return calls.execute(PLAIN, (w, x), None, {})
    return calls.execute(BIASED, (w, x), None, {"bias": bias})


# The product with the transpose, likewise.


def turned_product(w: SparseMatrix, turned: SparseMatrix | None, y: torch.Tensor) -> torch.Tensor:
    """``W^T y`` for y (..., R): by ``turned``, the compressed transpose, if that is not None and y
    is FEW vectors at most."""
    if turned is not None and _few(w, y):
        return multiply(turned, y, None)
    y = materialised(y) if is_lazy(y) else y
    if not on_gpu(y.device):
        with no_autocast(y):
            return reference.sparse_matmul(PLAIN, reference.laid_out(w).t(), y)
    return plans.by_dense(PLAIN, dense_of(w).t(), y, {})


def transpose_for(w: SparseMatrix, y: torch.Tensor) -> SparseMatrix | None:
    """The transpose that :func:`turned_product` should be given for y, or None. It is made if need
    be, but not while a CUDA graph is captured, since that waits for the device, and not for tensors
    of inference mode, since it would not be kept."""
    if w.format == "dense" or not _few(w, y) or not on_gpu(y.device):
        return None
    turned = w.known_transpose()
    if turned is not None or y.is_meta:
        return turned
    if torch.cuda.is_current_stream_capturing() or state_of(w) is None:
        return None
    return w.transpose()


def _few(w: SparseMatrix, y: torch.Tensor) -> bool:
    """Whether y (..., R) is FEW vectors at most."""
    return y.numel() <= FEW * w.shape[0]


# Eager calls that record gradients.


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a vector that was added to each vector of the result."""
    return grad.sum(tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad.clone()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, w, plan):
        ctx.w, ctx.state = w, state_of(w)
        if plan is None:
            return multiply(w, x, bias)
        descriptor, parameters = (PLAIN, {}) if bias is None else (BIASED, {"bias": bias})
        return calls.launch(plan, descriptor, (w, x), None, parameters)

    @staticmethod
    def backward(ctx, grad):
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            check_unwritten(ctx.w, ctx.state)
            to_x = _turned(ctx.w, grad.contiguous() if 0 in grad.stride() else grad)
        if ctx.needs_input_grad[1]:
            to_bias = bias_gradient(grad)
        return to_x, to_bias, None, None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, w):
        ctx.w, ctx.state = w, state_of(w)
        return turned_product(w, transpose_for(w, y), y)

    @staticmethod
    def backward(ctx, grad):
        check_unwritten(ctx.w, ctx.state)
        if is_watched(grad):
            return _operator(ctx.w, grad, False), None
        if torch.is_grad_enabled():
            return _Product.apply(grad, None, ctx.w, None), None
        return multiply(ctx.w, grad, None), None


def _turned(w: SparseMatrix, grad: torch.Tensor) -> torch.Tensor:
    """``W^T grad``: by the operator where a tracer or transform must see it, by a function of
    autograd where its gradient may be asked for, else by the kernels alone."""
    if is_watched(grad):
        return _operator(w, grad, True)
    if torch.is_grad_enabled():
        return _Turned.apply(grad, w)
    return turned_product(w, transpose_for(w, grad), grad)


def _operator(w: SparseMatrix, x: torch.Tensor, turned: bool) -> torch.Tensor:
    operators = operators_of(PRODUCT)
    return operators.product(x, operators.Matrix.of(w), None, turned, False)


@lru_cache(maxsize=1024)
def parts(descriptor: SparseMatmul) -> Parts:
    """The parts of a call whose gradient is recorded."""
    return autograd.parts(descriptor, BIASED if is_biased(descriptor) else PLAIN, -1)


def _apply(descriptor: SparseMatmul, operands: tuple, bias, plan) -> torch.Tensor:
    w, x = operands
    return _Product.apply(x, bias, w, plan)


RECORDING = Recording(parts, _apply)


# The call as it is made.


run = front_door(PRODUCT, calls, recorder(PRODUCT, calls, RECORDING))
RUNS = {SparseMatmul: run}


def matmul(
    w: SparseMatrix,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue | tuple[Epilogue, ...] = (),
    out: torch.Tensor | None = None,
    **parameters: float | torch.Tensor,
) -> torch.Tensor:
    """``y[..., r] = epilogue(sum_c W[r, c] * x[..., c] + bias[r])`` for a compressed matrix ``w``.

    ``x`` (..., C) has the dtype of w, ``bias`` is (R,) or None, and the result (..., R) as from
    ``torch.nn.functional.linear``; ``epilogue`` is none, one or several of
    :mod:`kernlib.descriptors.epilogues`, with one keyword argument for each of its ``parameters``.
    ``out`` (..., R) is written in place.

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.SparseMatmul`. Raises ValueError for
    shapes and devices that do not fit each other and for parameters that are missing, TypeError for
    other dtypes, kinds of arguments and names, RuntimeError for an ``out`` while gradients are
    recorded. The model is MACKO-SpMV's ``multiply``.

    Example:
        >>> w = kl.sparse.compress(torch.tensor([[0.0, 2.0], [-3.0, 0.0]]), format="bitmap")
        >>> x, bias = torch.tensor([1.0, 10.0]), torch.tensor([0.5, 0.5])
        >>> kl.sparse.matmul(w, x, bias, epilogue=kl.Relu())
        tensor([20.5000,  0.0000])
    """
    if bias is None:
        descriptor = _descriptor(epilogue, False) if epilogue else PLAIN
        return run_kernel(descriptor, w, x, out=out, **parameters)
    descriptor = _descriptor(epilogue, True) if epilogue else BIASED
    return run_kernel(descriptor, w, x, out=out, bias=bias, **parameters)


def _descriptor(epilogue, bias: bool) -> SparseMatmul:
    epilogue = as_epilogues(epilogue)
    epilogues = (Bias(), *epilogue) if bias else epilogue
    return SparseMatmul(epilogues) if is_dynamo_compiling() else _cached(epilogues)


_cached = lru_cache(maxsize=256)(SparseMatmul)  # which Dynamo cannot trace


def planned(descriptor: SparseMatmul, tensors: tuple, arguments: dict) -> list[Planned]:
    """The parts of a call that have a plan, and of its gradient by x, for which the transpose is
    made."""
    from kernlib.runtime.ahead import planned_product

    check_kinds(descriptor, tensors)
    check_dense(("x",), x=tensors[1], out=arguments.get("out"))
    call = planned_product(PRODUCT, calls, parts, descriptor, tensors, arguments)
    w, x = call.request[1]
    if not call.recorded or not x.requires_grad or x.device.type != "cuda" or not x.numel():
        return [call]
    grad = x.new_empty((*x.shape[:-1], w.shape[0]))
    transpose = transpose_for(w, grad)
    if transpose is None:
        return [call]
    return [call, planned_product(PRODUCT, calls, None, PLAIN, (transpose, grad), {})]


def variants(
    descriptor: SparseMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, matrices of ``dtypes`` and any
    format; none for float64. Raises KeyError for other dtypes."""
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    specs: dict[KernelSpec, None] = {}
    for epilogue in (descriptor.epilogue, parts(descriptor).product.epilogue, ()):
        for name in choose.formats():
            specs |= dict.fromkeys(choose.variants(name, epilogue, names, arch))
    return list(specs)
