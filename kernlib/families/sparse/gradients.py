"""Gradients of products with compressed matrices: their formulas, which are stated only here, and
eager calls that record them.

The gradient of ``W x`` with respect to x is ``W^T grad``. The gradient of that with respect to grad
is a product with W again, and so on to any order. Up to FEW vectors are multiplied by the
compressed transpose, which the matrix makes once and keeps. More vectors, as in training, are
multiplied by the matrix laid out densely, which needs no second compressed copy.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernlib.families.sparse import kept, reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.plans import by_dense, laid_out
from kernlib.families.sparse.product import BIASED, PLAIN, PRODUCT, calls, multiply
from kernlib.families.sparse.tensors import check_unwritten, state_of
from kernlib.runtime import autograd
from kernlib.runtime.arguments import no_autocast
from kernlib.runtime.autograd import Parts, Recording, is_biased, is_watched, recorder
from kernlib.runtime.operation import operators_of
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.tensors import is_lazy, materialised

FEW = 16  # vectors that kernels take at once


@lru_cache(maxsize=1024)
def parts(descriptor: SparseMatmul) -> Parts:
    """The parts of a call whose gradient is recorded."""
    return autograd.parts(descriptor, BIASED if is_biased(descriptor) else PLAIN, -1)


# The product with the transpose, without a record.


def turned_product(w: SparseMatrix, turned: SparseMatrix | None, y: torch.Tensor) -> torch.Tensor:
    """``W^T y`` for y (..., R): by ``turned``, the compressed transpose, if that is not None and y
    is FEW vectors at most."""
    if turned is not None and _few(w, y):
        return multiply(turned, y, None)
    y = materialised(y) if is_lazy(y) else y
    if not on_gpu(y.device):
        with no_autocast(y):
            return reference.sparse_matmul(PLAIN, kept.laid_out(w).t(), y)
    return by_dense(PLAIN, laid_out(w).t(), y, {})


def transpose_for(w: SparseMatrix, y: torch.Tensor) -> SparseMatrix | None:
    """The transpose that :func:`turned_product` should be given for y, or None. It is made if need
    be, but not while a CUDA graph is captured, since that waits for the device, and not for tensors
    of inference mode, since it would not be kept."""
    if w.format == "dense" or not _few(w, y) or not on_gpu(y.device):
        return None
    known = w.known_transpose()
    if known is not None or y.is_meta:
        return known
    if torch.cuda.is_current_stream_capturing() or state_of(w) is None:
        return None
    return w.transpose()


def _few(w: SparseMatrix, y: torch.Tensor) -> bool:
    """Whether y (..., R) is FEW vectors at most."""
    return y.numel() <= FEW * w.shape[0]


def bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a vector that was added to each vector of the result."""
    return grad.sum(tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad.clone()


# Eager calls.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, w, plan):
        ctx.w, ctx.state = w, state_of(w)
        if plan is None:
            return multiply(w, x, bias)
        descriptor, given = (PLAIN, {}) if bias is None else (BIASED, {"bias": bias})
        return calls.launch(plan, descriptor, (w, x), None, given)

    @staticmethod
    def backward(ctx, grad):
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            check_unwritten(ctx.w, ctx.state)
            to_x = _turned(ctx.w, grad)
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
        made = _Product.apply if torch.is_grad_enabled() else _unrecorded
        return made(grad, None, ctx.w, None), None


def _unrecorded(x, bias, w, plan):
    return multiply(w, x, bias)


def _apply(descriptor: SparseMatmul, operands: tuple, bias, plan) -> torch.Tensor:
    w, x = operands
    return _Product.apply(x, bias, w, plan)


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


RECORDING = Recording(parts, _apply)
recorded = recorder(PRODUCT, calls, RECORDING)
