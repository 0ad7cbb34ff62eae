"""Products with block-sparse matrices as they are called: when a plan may be taken again, what
computes a call, and its gradients.

CPU tensors, float64 and calls inside transforms of torch.func are computed by the reference.

The gradient of a product by one operand is a product of the other and the gradient of the result,
as with dense matrices, so each mode's gradients are products of the other modes: that by a sparse
operand is "sdd", on the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.blocksparse import checks, plans
from kernlib.families.blocksparse.checks import LAYOUT_NAMES
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime import autograd, products
from kernlib.runtime.arguments import autocast, parameter_key
from kernlib.runtime.autograd import (
    Parts,
    Recording,
    bias_gradient,
    is_biased,
    is_watched,
    recorder,
)
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import KERNELS, REFERENCE, operators_of
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import UNREADABLE, as_rows, check_dense, is_wrapped, signature

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

SIZES = (16, 32, 64, 128)  # of blocks


# Products as they are given, without autocast and without a record of gradients.


def _key(descriptor: BlockSparseMatmul, operands: tuple, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor, the precision, the layout's sizes and device, but
    nothing of its contents, then shapes, strides, dtypes, device, alignment and kinds of numbers.
    None where there can be no plan."""
    try:
        permitted = float32_precision() if descriptor.precision is None else None
        layout, a, b = operands
        if not isinstance(layout, Layout):  # whose own attributes may have these names
            checks.check_layout(layout)
        key = (descriptor.text, permitted, layout.key, *signature(a), *signature(b))
        if out is not None:
            key += signature(out)
        for name, value in parameters.items():
            key += (name, parameter_key(value))
    except UNREADABLE:
        checks.check_kinds(descriptor, operands)
        check_dense((), out=out)
        return None
    return key


def _way(call: products.Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    """Kernels compute on CUDA; torch computes all else, and calls inside a transform of torch.func.
    Raises UnsupportedError for devices that have no backend."""
    if not products.is_on_gpu(call.device) or call.dtype not in KERNEL_TYPES:
        return REFERENCE
    tensors = (*operands[1:], out, *parameters.values())
    return REFERENCE if any(map(is_wrapped, tensors)) else KERNELS


def _reference(descriptor: BlockSparseMatmul, operands: tuple, parameters: dict) -> torch.Tensor:
    from kernlib.families.blocksparse import reference  # 2 ms; only torch's way needs it

    return reference.blocksparse_matmul(descriptor, *operands, parameters)


def _tensors(operands: tuple) -> tuple[torch.Tensor, ...]:
    layout, a, b = operands
    return (a, b, *layout.tensors)


def _names(operands: tuple) -> tuple[str, ...]:
    return ("a", "b", *LAYOUT_NAMES)


def _cast(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    layout, a, b = operands
    (a, b), parameters = autocast((a, b), parameters)
    return (layout, a, b), parameters


PRODUCT = products.Product(
    name="blocksparse_matmul",
    operators="kernlib.families.blocksparse.operators",
    key=_key,
    check=checks.check_call,
    way=_way,
    plan=plans.plan,
    reference=_reference,
    tensors=_tensors,
    names=_names,
    check_operands=checks.check_kinds,
    cast=_cast,
)
calls = products.bind(PRODUCT)


# Gradients: their formulas, stated here alone.


@lru_cache(maxsize=1024)
def parts(descriptor: BlockSparseMatmul) -> Parts:
    """The parts of a call with a gradient."""
    product = descriptor.replace(epilogue=(Bias(),) if is_biased(descriptor) else ())
    return autograd.parts(descriptor, product, descriptor.axis)


class Term(NamedTuple):
    """A gradient as a product of two of ``"grad"``, ``"a"`` and ``"b"``."""

    descriptor: BlockSparseMatmul
    left: str
    right: str


@lru_cache(maxsize=1024)
def terms(descriptor: BlockSparseMatmul) -> tuple[Term, Term]:
    """The gradients by a and by b. With ``y = op(a) op(b)`` the gradient by op(a) is ``grad
    op(b)^T`` and by op(b) ``op(a)^T grad``. Where op is the transpose, the operand's gradient is
    the transpose of it."""
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
    """The gradients by a and b that are needed, from ``tensors`` "grad", "a" and "b", by
    ``multiply( descriptor, layout, a, b)``."""
    grads: list[torch.Tensor | None] = [None, None]
    for index, (term, name) in enumerate(zip(terms(descriptor), "ab", strict=True)):
        if needs[index]:
            operand = tensors[name]
            left, right = _folded(term, layout, tensors, operand)
            grads[index] = multiply(term.descriptor, layout, left, right).sum_to_size(operand.shape)
    return grads


def _folded(term: Term, layout: Layout, tensors: dict, operand) -> tuple:
    """The factors of a gradient. The gradient of values without a batch is one sum over the batch
    too: the batch joins the dimension that is summed over, where that is in front of the last."""
    left, right = tensors[term.left], tensors[term.right]
    product = term.descriptor
    inner = product.mode == "sdd" and product.transpose_a and not product.transpose_b
    if not inner or layout.heads is not None or operand.dim() > 3:
        return left, right
    if left.shape[:-2] != right.shape[:-2]:
        return left, right
    return as_rows(left), as_rows(right)


def masked(descriptor: BlockSparseMatmul, operands: tuple, y: torch.Tensor) -> torch.Tensor:
    """What torch's epilogues made of a result, 0 in slots that hold no block."""
    if descriptor.mode != "sdd":
        return y
    from kernlib.families.blocksparse import reference

    return torch.where(reference.is_stored(operands[0]), y, 0.0)


# Eager calls that record them.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, layout, plan, bias, a, b):
        ctx.descriptor, ctx.layout, ctx.plan = descriptor, layout, plan
        # The layout too, so that torch notices writes.
        ctx.save_for_backward(a, b, *layout.tensors)
        request = descriptor, (layout, a, b), None, {} if bias is None else {"bias": bias}
        return calls.execute(*request) if plan is None else calls.launch(plan, *request)

    @staticmethod
    def backward(ctx, grad):
        descriptor, needs, plan = ctx.descriptor, ctx.needs_input_grad, ctx.plan
        a, b, *_ = ctx.saved_tensors
        if 0 in grad.stride():  # sum()'s: kernels that copy tiles cannot read its strides
            grad = grad.contiguous()
        to_bias = bias_gradient(grad, descriptor.axis) if needs[3] else None
        request = descriptor, ctx.layout, {"grad": grad, "a": a, "b": b}, needs[4:]
        if plan is None or torch.is_grad_enabled() or is_watched(grad):
            return None, None, None, to_bias, *gradients(*request, _multiply)
        return None, None, None, to_bias, *gradients_by_plans(*request, plan)


class _Step(NamedTuple):
    """A gradient that a backward pass computes."""

    plan: products.ProductPlan
    term: Term
    rows: bool  # whether both factors go in as rows
    shape: torch.Size | None  # to which the product is summed


_backwards = PlanCache()


def gradients_by_plans(
    descriptor, layout: Layout, tensors: dict, needs: tuple, forward: object = None
) -> list[torch.Tensor | None]:
    """:func:`gradients` by the kernels alone, their plans decided once for those of one signature
    and one plan of the forward pass, if there is one."""
    permitted = float32_precision() if descriptor.precision is None else None
    # The entry holds the plan, so that no other has its id.
    what = descriptor.text if forward is None else id(forward)
    key = what, permitted, layout.key, needs, *map(signature, tensors.values())
    steps = _backwards.plans.get(key)
    if steps is None:
        grads = gradients(descriptor, layout, tensors, needs, _multiply)
        steps = [
            _step(term, layout, tensors, tensors[name]) if need else None
            for term, name, need in zip(terms(descriptor), "ab", needs, strict=True)
        ]
        if all(step is None or step.plan is not None for step in steps):
            _backwards.keep(key, (forward, *steps))
        return grads
    grads = []
    for step in steps[1:]:
        if step is None:
            grads.append(None)
            continue
        left, right = tensors[step.term.left], tensors[step.term.right]
        if step.rows:
            left, right = as_rows(left), as_rows(right)
        product = calls.launch(step.plan, step.term.descriptor, (layout, left, right), None, {})
        grads.append(product if step.shape is None else product.sum_to_size(step.shape))
    return grads


def _step(term: Term, layout: Layout, tensors: dict, operand: torch.Tensor) -> _Step:
    left, right = _folded(term, layout, tensors, operand)
    plan = calls.find(term.descriptor, (layout, left, right), None, {})
    rows = left is not tensors[term.left]
    shape = operand.shape if plan is not None and plan.shape != operand.shape else None
    return _Step(plan, term, rows, shape)


def _multiply(descriptor: BlockSparseMatmul, layout: Layout, a, b) -> torch.Tensor:
    """A product: by the library's operator where a mode watches, by a recording function where it
    may be differentiated, else by the kernels alone."""
    if is_watched(a) or is_watched(b):
        return operators_of(PRODUCT).multiply(descriptor, layout, a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Product.apply(descriptor, layout, None, None, a, b)
    return calls.execute(descriptor, (layout, a, b), None, {})


def _apply(descriptor: BlockSparseMatmul, operands: tuple, bias, plan) -> torch.Tensor:
    layout, a, b = operands
    return _Product.apply(descriptor, layout, plan, bias, a, b)


_recorded = recorder(PRODUCT, calls, Recording(parts, _apply, masked))
run = products.front_door(PRODUCT, calls, _recorded)
RUNS = {BlockSparseMatmul: run}


# Calls before anybody makes them.


def planned(descriptor: BlockSparseMatmul, tensors: tuple, arguments: dict) -> list[Planned]:
    """The parts of a call that have a plan."""
    from kernlib.runtime.ahead import planned_product

    return [planned_product(PRODUCT, calls, parts, descriptor, tensors, arguments)]


def variants(
    descriptor: BlockSparseMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose, untuned, for a descriptor, its gradients included,
    inputs of ``dtypes`` and square blocks of any size; none for float64. Raises KeyError for other
    dtypes."""
    from kernlib.families.blocksparse.lowering import choose

    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    precision = None
    if descriptor.precision is not None:
        precision = plans.kernel_precision(descriptor.precision, torch.float32)
    recorded = [parts(descriptor).product, *(term.descriptor for term in terms(descriptor))]
    specs: dict[KernelSpec, None] = {}
    for product in dict.fromkeys((descriptor, *recorded)):
        for size in SIZES:
            shape = product.epilogue, product.mode, (size, size)
            specs |= dict.fromkeys(choose.variants(*shape, names, arch, precision))
    return list(specs)
