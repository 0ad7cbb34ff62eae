"""Gradients of block-sparse products: their formulas, stated here alone, and eager calls that
record them.

The gradient of a product by one operand is a product of the other and the gradient of the result,
as with dense matrices, so each mode's gradients are products of the other modes: that by a sparse
operand is "sdd", on the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.product import PRODUCT, calls
from kernlib.families.blocksparse.reference import is_stored
from kernlib.runtime import autograd
from kernlib.runtime.autograd import Parts, is_biased, is_watched, recorder
from kernlib.runtime.operation import operators_of
from kernlib.runtime.tensors import as_rows


@lru_cache(maxsize=1024)
def parts(descriptor: BlockSparseMatmul) -> Parts:
    """What a call with a gradient consists of."""
    made = descriptor.replace(epilogue=(Bias(),) if is_biased(descriptor) else ())
    return autograd.parts(descriptor, made, descriptor.axis)


class Term(NamedTuple):
    """A gradient as a product of two of ``"grad"``, ``"a"`` and ``"b"``."""

    descriptor: BlockSparseMatmul
    left: str
    right: str


@lru_cache(maxsize=1024)
def terms(descriptor: BlockSparseMatmul) -> tuple[Term, Term]:
    """The gradients by a and by b. Of ``y = op(a) op(b)`` that of op(a) is ``grad op(b)^T``, that
    of op(b) ``op(a)^T grad``; where op is the transpose, that of its operand is theirs."""
    y, a, b = descriptor.mode
    of_a, of_b = descriptor.transpose_a, descriptor.transpose_b
    by_a = Term(_plain(descriptor, a + y + b, False, not of_b), "grad", "b")
    if of_a:
        by_a = Term(_plain(descriptor, a + b + y, of_b, True), "b", "grad")
    by_b = Term(_plain(descriptor, b + a + y, not of_a, False), "a", "grad")
    if of_b:
        by_b = Term(_plain(descriptor, b + y + a, True, of_a), "grad", "a")
    return by_a, by_b


def _plain(descriptor: BlockSparseMatmul, mode: str, of_a: bool, of_b: bool) -> BlockSparseMatmul:
    return BlockSparseMatmul(
        mode, transpose_a=of_a, transpose_b=of_b, precision=descriptor.precision
    )


def gradients(
    descriptor: BlockSparseMatmul,
    layout: Layout,
    tensors: dict[str, torch.Tensor],
    needs: tuple[bool, bool],
    multiply: Callable,
) -> list[torch.Tensor | None]:
    """Those by a and b that are needed, of ``tensors`` "grad", "a" and "b", by ``multiply(
    descriptor, layout, a, b)``."""
    found: list[torch.Tensor | None] = [None, None]
    for index, (term, name) in enumerate(zip(terms(descriptor), "ab", strict=True)):
        if needs[index]:
            operand = tensors[name]
            left, right = _folded(term, layout, tensors, operand)
            made = multiply(term.descriptor, layout, left, right)
            found[index] = made.sum_to_size(operand.shape)
    return found


def _folded(term: Term, layout: Layout, tensors: dict, operand) -> tuple:
    """The factors of a gradient. That of values without a batch is one sum over all of it: the
    batch joins the dimension that is summed over, where that is in front of the last."""
    left, right = tensors[term.left], tensors[term.right]
    made = term.descriptor
    inner = made.mode == "sdd" and made.transpose_a and not made.transpose_b
    if not inner or layout.heads is not None or operand.dim() > 3:
        return left, right
    if left.shape[:-2] != right.shape[:-2]:
        return left, right
    return as_rows(left), as_rows(right)


def bias_gradient(descriptor: BlockSparseMatmul, grad: torch.Tensor) -> torch.Tensor:
    """Of a vector that was added to each line of the result's features."""
    features = grad.movedim(descriptor.axis, -1)
    return features.reshape(-1, features.shape[-1]).sum(0)


# Eager calls.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, layout, plan, bias, a, b):
        ctx.descriptor, ctx.layout = descriptor, layout
        ctx.save_for_backward(a, b, *layout.tensors)
        request = descriptor, (layout, a, b), None, {} if bias is None else {"bias": bias}
        return calls.execute(*request) if plan is None else calls.launch(plan, *request)

    @staticmethod
    def backward(ctx, grad):
        descriptor, needs = ctx.descriptor, ctx.needs_input_grad
        a, b, *_ = ctx.saved_tensors  # of the layout too, for torch to see what was written
        to_bias = bias_gradient(descriptor, grad) if needs[3] else None
        tensors = {"grad": grad, "a": a, "b": b}
        found = gradients(descriptor, ctx.layout, tensors, needs[4:], _multiply)
        return None, None, None, to_bias, *found


def _multiply(descriptor: BlockSparseMatmul, layout: Layout, a, b) -> torch.Tensor:
    """A product: by the operator where somebody must see it, by a function that records where a
    gradient of it may be asked for, else by nothing but the kernels."""
    if is_watched(a) or is_watched(b):
        return operators_of(PRODUCT).multiply(descriptor, layout, a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Product.apply(descriptor, layout, None, None, a, b)
    return calls.execute(descriptor, (layout, a, b), None, {})


def _apply(descriptor: BlockSparseMatmul, operands: tuple, bias, plan) -> torch.Tensor:
    layout, a, b = operands
    return _Product.apply(descriptor, layout, plan, bias, a, b)


class _Recording(autograd.Recording):
    """Recorded as other products are, with 0 where the result has slots without a block."""

    __slots__ = ()

    def result(self, request: tuple, plan=None) -> torch.Tensor:
        y = super().result(request, plan)
        return masked(request[0], request[1][0], y)


def masked(descriptor: BlockSparseMatmul, layout: Layout, y: torch.Tensor) -> torch.Tensor:
    """What torch's epilogues made of a result, 0 in slots that hold no block."""
    if descriptor.mode != "sdd" or not parts(descriptor).rest:
        return y
    return torch.where(is_stored(layout), y, 0.0)


RECORDING = _Recording(parts, _apply)
recorded = recorder(PRODUCT, calls, RECORDING)
