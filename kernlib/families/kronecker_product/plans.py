"""Plans of Kronecker products: the problem that lowering sees, and its loaded kernels; or, where
torch is faster, torch's batched products, a factor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib import events
from kernlib.canonical import encode
from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import Node, Operation
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.lowering import choose
from kernlib.families.kronecker_product.lowering.problem import Factor, Layout, Problem
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice
from kernlib.lowering.steps import Lowered
from kernlib.runtime import expressions, tuned
from kernlib.runtime.arguments import address_of, folded, no_autocast
from kernlib.runtime.devices import allocator, arch_of, lower_on, model
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.precision import float32_precision, kernel_precision
from kernlib.runtime.products import Call, ProductPlan, make_plan
from kernlib.runtime.sequence import launcher, load_steps

if TYPE_CHECKING:
    from kernlib.families.kronecker_product.lowering import by_torch
    from kernlib.families.kronecker_product.lowering.gradients import Gradients

FAMILY = KroneckerProduct.family
LEAST_WORKSPACE = 1 << 30  # bytes that a candidate may always take; else x and result together
# Passes of torch that leave out a summand where its scale is 0, beside those that add it.
SUMMAND = 5


def plan(call: Call, descriptor: KroneckerProduct, operands, out, parameters) -> ProductPlan:
    """The plan of a checked call on CUDA tensors, its kernels loaded."""
    device = operands[0].get_device()
    arch_of(device)  # an old device is refused for an empty result too
    problem, copies, apart = problem_of(call, descriptor, operands, out, parameters)
    request, lowered = (descriptor, operands, out, parameters), None
    if call.batch:
        lowered = lower(descriptor, problem, device, is_copied(descriptor, out))
        if lowered is None:
            return _torch_plan(call, request, problem)
    names = ("x", *[f"factor{index}" for index in range(len(operands) - 1)])
    copies, of_summands = copies[: len(operands)], copies[len(operands) :]
    placed = partial(place, copies) if any(copies) else _place_as_given
    return make_plan(operands, call, request, placed, names, lowered, apart, copies=of_summands)


def signature(problem: Problem) -> bytes:
    """The bytes under which the fastest kernels are kept, equal for calls of the same speed."""
    if problem.batch == 1:  # then the stride from batch to batch does not count
        problem = problem._replace(x=problem.x._replace(batch=0), out=problem.out._replace(batch=0))
    return encode((FAMILY, problem))


def lower(
    descriptor: KroneckerProduct, problem: Problem, device: int, copied: bool
) -> Lowered | None:
    """The kernels of a problem on a device: the tuned ones, or those by rule. None if torch
    computes it. ``copied`` says whether torch's result must be copied into an ``out``."""
    arch, epilogue = arch_of(device), descriptor.epilogue
    candidates = partial(_candidates, epilogue, problem, arch, device)
    choice = tuned.choice(FAMILY, model(device), signature(problem), candidates)
    passes = torch_passes(descriptor, problem, copied)
    return lower_on(
        lambda count: choose.lower(epilogue, problem, arch, count, choice, passes), device
    )


def _candidates(epilogue: tuple, problem: Problem, arch: str, device: int) -> list[Choice]:
    """What tuning may choose from, without those whose workspace is out of proportion."""
    pairs = choose.candidates(epilogue, problem, arch, model(device).multiprocessors)
    features = problem.in_features + problem.out_features
    both = problem.batch * problem.columns * features * DTYPES[problem.dtype].bytes
    most = max(LEAST_WORKSPACE, both)
    fitting = [choice for choice, lowered in pairs if lowered.workspace <= most]
    return fitting or [choice for choice, _ in pairs]


def is_copied(descriptor: KroneckerProduct, out: torch.Tensor | None) -> bool:
    """Whether there is an ``out`` into which torch's last product cannot write."""
    return out is not None and (bool(descriptor.epilogue) or not out.is_contiguous())


def torch_passes(descriptor: KroneckerProduct, problem: Problem, copied: bool) -> int | None:
    """How many passes over the result torch would make after its products. None where torch must
    not compute the call: for half types, since the result of one factor may exceed their range, and
    for float32 where torch's products may be in TF32."""
    exact = problem.dtype == "float64"
    if problem.dtype == "float32":
        exact = problem.precision == "fp32" == float32_precision()
    return passes_of(descriptor.epilogue) + copied if exact else None


def passes_of(epilogue: tuple[Epilogue, ...]) -> int:
    """Passes over the result that torch makes of an epilogue: one for each operation."""
    return sum(
        _operations(part.tree()) + SUMMAND * sum(scale is not None for _, scale in part.summands)
        for part in epilogue
    )


def _operations(node: Node) -> int:
    if not isinstance(node, Operation):
        return 0
    return 1 + sum(_operations(operand) for operand in node.operands)


def takes(call: Call, descriptor: KroneckerProduct, operands: tuple) -> bool:
    """Whether kernels compute a checked call on CUDA tensors: a block's shared memory must hold
    each of its factors. Raises UnsupportedError for GPUs that are too old."""
    arch = arch_of(operands[0].get_device())
    return choose.takes(descriptor.shapes, DTYPE_NAMES[call.dtype], arch)


def _torch_plan(call: Call, request: tuple, problem: Problem) -> ProductPlan:
    """The plan of a call that torch computes."""
    from kernlib.families.kronecker_product.lowering import by_torch

    descriptor, operands, out, _ = request
    read = (None,) * len(descriptor.summands)  # as they are given
    apart = is_copied(descriptor, out)
    chain = by_torch.fastest(problem, torch_passes(descriptor, problem, apart))
    compute = partial(by_products, chain, call.out_shape)
    return make_plan(operands, call, request, _place_as_given, (), None, apart, compute, read)


def by_products(
    chain: list[by_torch.Product],
    shape: tuple[int, ...],
    descriptor: KroneckerProduct,
    operands: tuple,
    parameters: dict,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A result of this ``shape`` by torch's products ``chain``, with the epilogue behind them.
    Without an epilogue a contiguous ``out`` is written directly. ``parameters`` are numbers and
    tensors on the device. The products are those of ``reference.multiply`` with the factors on the
    right. All sizes are known here, which halves the time on the host."""
    y, *factors = operands
    if events.listening():
        message = f"{FAMILY} on {y.device}: no kernel, computed by torch"
        events.emit("torch", "", "", message)
    if y.shape[:-2] != shape[:-2]:
        y = y.expand(*shape[:-1], y.shape[-1])
    with no_autocast(y):
        for product in chain:
            target = out if product is chain[-1] else None
            y = _along(y, product, _matrix(product, factors, descriptor), target)
        if out is not None:
            return out
        y = y.reshape(shape)
        if descriptor.epilogue:
            y = expressions.apply(descriptor.epilogue, y, parameters).contiguous()
    # Not as a view, which autograd would forbid to write in place behind a recorded product.
    return torch.ops.aten._unsafe_view.default(y, shape)


def _matrix(
    product: by_torch.Product, factors: list[torch.Tensor], descriptor: KroneckerProduct
) -> torch.Tensor:
    """What a product multiplies by: a factor, or neighbours multiplied out."""
    from kernlib.families.kronecker_product.reference import kron

    matrices = []
    for number in range(product.factor, product.factor + product.parts):
        factor = factors[number]
        if factor.dim() > 2:  # a batch of one matrix
            factor = factor[(0,) * (factor.dim() - 2)]
        matrices.append(factor.mT if descriptor.transposed[number] else factor)
    return reduce(kron, matrices)


def _along(
    x: torch.Tensor, product: by_torch.Product, factor: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    left, (rows, columns), right = product.left, product.size, product.right
    if out is not None:
        out = out.view(left, columns) if right == 1 else out.view(left, columns, right)
    if right == 1:
        return torch.mm(x.reshape(left, rows), factor, out=out)
    x = x.reshape(left, rows, right)
    if product.turned:
        y = torch.mm(x.mT.reshape(left * right, rows), factor).view(left, right, columns).mT
        return y if out is None else out.copy_(y)
    return torch.bmm(factor.mT.expand(left, columns, rows), x, out=out)


def _place_as_given(operands: tuple) -> tuple[list[int], None]:
    return [t.data_ptr() for t in operands], None


def place(copies: tuple, operands: tuple) -> tuple[list[int], list]:
    """The addresses of tensors, and the tensors. One with a shape in ``copies`` is expanded and
    copied to that shape first."""
    read = [
        t if shape is None else t.expand(shape).contiguous()
        for t, shape in zip(operands, copies, strict=True)
    ]
    return [t.data_ptr() for t in read], read


def problem_of(
    call: Call, descriptor: KroneckerProduct, operands: tuple, out, parameters: dict
) -> tuple[Problem, tuple, bool]:
    """The problem of a checked call; for each operand and then each summand the shape of the copy
    that is read in its place, or None; and whether a given ``out`` is written by a copy."""
    x, *factors = operands
    lead, inside = call.out_shape[:-2], descriptor.side == "left"
    rows = x.shape[-3 - descriptor.axis]
    batch, columns = math.prod(lead), rows
    if not inside and _is_one_batch(factors):
        lead, batch, columns = (), 1, batch * rows  # a batch of x alone is more rows
    seen, x_copy = _seen(x, (*call.out_shape[:-2], *x.shape[-2:]), lead, inside)
    view = call.out_shape, lead, inside
    written = None
    if out is not None:
        written, out_copy = _seen(out, *view)
        written = written if out_copy is None else None
    apart = out is not None and written is None
    matrices, copies = [], [x_copy]
    sizes = sizes_of(descriptor)
    for factor, turned, size in zip(factors, descriptor.transposed, sizes, strict=True):
        matrix, copy = _factor(factor, turned != inside, size, lead)
        matrices.append(matrix)
        copies.append(copy)
    summands = []
    for name in descriptor.summands:
        layout, copy = _seen(parameters[name], *view)
        summands.append(layout)
        copies.append(copy)
    problem = Problem(
        batch,
        columns,
        inside,
        tuple(matrices),
        seen,
        written or _contiguous(columns, descriptor.out_features, inside),
        DTYPE_NAMES[call.dtype],
        kernel_precision(descriptor.precision, call.dtype),
        tuple(summands),
    )
    return problem, tuple(copies), apart


def _is_one_batch(factors: Sequence[torch.Tensor]) -> bool:
    """Whether no factor is a batch of several."""
    return all([math.prod(factor.shape[:-2]) == 1 for factor in factors])


def sizes_of(descriptor: KroneckerProduct) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the factors as lowering sees them: on the right of x."""
    inside = descriptor.side == "left"
    return tuple([shape[::-1] if inside else shape for shape in descriptor.shapes])


def _contiguous(columns: int, features: int, inside: bool) -> Layout:
    strides = (1, columns) if inside else (features, 1)
    return Layout(columns * features, 0, *strides)


def _seen(t: torch.Tensor, shape: tuple, lead: tuple, inside: bool) -> tuple[Layout, tuple | None]:
    """The layout of x, out or a summand, expanded to ``shape``. Its batch has the dimensions
    ``lead``; other dimensions in front of the last two count as rows. If the memory has no such
    strides, also the shape of a copy that has, else None."""
    batch, strides = shape[:-2], t.expand(shape).stride()
    alignment = address_of(t) & 15 or 16
    if inside:
        outer = folded(batch, strides[:-2])
        if outer is not None:
            return Layout(outer, 0, strides[-1], strides[-2], alignment), None
        return _contiguous(shape[-1], shape[-2], True), shape
    if lead:
        outer, row = folded(batch, strides[:-2]), strides[-2]
    else:
        outer, row = 0, folded(shape[:-1], strides[:-1])
    if outer is not None and row is not None:
        return Layout(outer, 0, row, strides[-1], alignment), None
    copied = _contiguous(shape[-2], shape[-1], False)
    return (copied if lead else copied._replace(batch=0)), shape


def _factor(
    t: torch.Tensor, turned: bool, size: tuple[int, int], lead: tuple
) -> tuple[Factor, tuple | None]:
    """A factor as it multiplies, and the shape of a copy if one is needed, else None. ``turned``
    says that the tensor is the transpose of the factor."""
    shape = (*lead, *t.shape[-2:])
    strides = t.expand(shape).stride() if lead else t.stride()
    outer = folded(lead, strides[: len(lead)]) if lead else 0
    copy, ends = None, strides[-2:]
    if outer is None:
        copy, ends, outer = shape, (t.shape[-1], 1), t.shape[-2] * t.shape[-1]
    return Factor(*size, *(ends[::-1] if turned else ends), outer), copy


# Gradients by x and by all factors at once.


class GradientPlan(NamedTuple):
    """What the gradients of one signature need besides their pointers."""

    index: int  # of the device
    place: Callable  # of gradient and operands: their addresses, and what to keep until the launch
    results: tuple[Callable[[], torch.Tensor] | None, ...]  # make new ones: by x, and by factors
    # That larger results are summed to, None for others; None where no result is larger.
    shapes: tuple[tuple[int, ...] | None, ...] | None
    launch: Callable[..., None]


def takes_gradients(descriptor: KroneckerProduct, dtype: torch.dtype, arch: str) -> bool:
    """Whether kernels compute the gradients by the factors."""
    from kernlib.families.kronecker_product.lowering import gradients  # 2 ms, for these alone

    return gradients.takes(sizes_of(descriptor), DTYPE_NAMES[dtype], arch)


def gradient_plan(
    call: Call, descriptor: KroneckerProduct, grad, operands: tuple, needs: tuple
) -> GradientPlan:
    """The plan of a checked call on CUDA tensors, its kernels loaded."""
    from kernlib.families.kronecker_product.lowering import gradients as lowering

    x, *factors = operands
    device, arch = x.get_device(), arch_of(x.get_device())
    gradients, copies = gradient_problem(descriptor, call, grad, operands, needs[0])
    lowered = lower_on(lambda count: lowering.lower(gradients, arch, count), device)
    numbers = range(len(factors))
    names = ["grad", "x", *[f"factor{index}" for index in numbers]]
    names += ["to_x"] * needs[0] + [f"to_factor{index}" for index in numbers]
    steps, inner = load_steps(lowered.steps, tuple(names), device)
    lead = call.out_shape[:-2]
    shapes = [(*lead, *x.shape[-2:])]
    for factor in factors:
        shapes.append(tuple(factor.shape) if gradients.is_one_sum else (*lead, *factor.shape[-2:]))
    makers = [allocator(shape, call.dtype, x.device) for shape in shapes]
    pairs = zip(operands, shapes, strict=True)
    sums = [None if t.shape == shape else tuple(t.shape) for t, shape in pairs]
    return GradientPlan(
        device,
        partial(place, copies) if any(copies) else _place_as_given,
        tuple(makers) if needs[0] else (None, *makers[1:]),
        tuple(sums) if any(sums) else None,
        launcher(steps, inner, x.device, lowered.workspace),
    )


def gradient_problem(
    descriptor: KroneckerProduct, call: Call, grad: torch.Tensor, operands: tuple, by_x: bool
) -> tuple[Gradients, tuple]:
    """The gradients of a checked call as lowering sees them, and for the incoming gradient and each
    operand the shape of the copy that is read in its place, or None."""
    from kernlib.families.kronecker_product.lowering.gradients import Gradients

    problem, copies, apart = problem_of(call, descriptor, operands, grad, {})
    back = _contiguous(problem.columns, problem.in_features, problem.inside)
    turned = tuple(flag != problem.inside for flag in descriptor.transposed)
    gradients = Gradients(problem, back, by_x, turned, _is_one_batch(operands[1:]))
    return gradients, (call.out_shape if apart else None, *copies)
