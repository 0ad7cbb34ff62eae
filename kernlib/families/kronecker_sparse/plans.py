"""Plans of Kronecker-sparse calls: the problem that lowering sees, and its kernels, loaded; or,
where torch is faster, its batched product.

Forward and backward are one kind of problem: ``out[i,l,r,s] = sum_q left[i,l,r,q] right[i,l,s,q]``
with the batch n as rows and k as depth in a product, j and k as rows and columns and the batch as
depth in the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernlib import events
from kernlib.canonical import encode
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse
from kernlib.families.kronecker_sparse.lowering import choose
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout, Problem
from kernlib.lowering.steps import Lowered
from kernlib.runtime import rehearsal, tuned
from kernlib.runtime.arguments import address_of, folded, no_autocast
from kernlib.runtime.devices import allocator, arch_of, lower_on, model
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.precision import float32_precision, kernel_precision
from kernlib.runtime.products import Call, ProductPlan, make_plan
from kernlib.runtime.sequence import launcher, load_steps

FAMILY = KroneckerSparse.family


class View(NamedTuple):
    """Strides of a tensor whose batch is one dimension, and its first address modulo 16."""

    batch: int
    feature: int
    alignment: int = 16


def view_of(t: torch.Tensor, batch_last: bool) -> View | None:
    """A tensor's strides with its batch folded; None where that takes a copy."""
    batch = slice(1, None) if batch_last else slice(0, -1)
    inner = folded(t.shape[batch], t.stride()[batch])
    if inner is None:
        return None
    return View(inner, t.stride(0 if batch_last else -1), _alignment(t))


def _alignment(t: torch.Tensor) -> int:
    """The first address modulo 16, 16 for 0; a meta tensor's storage counts as aligned."""
    return address_of(t) & 15 or 16


def copied_view(features: int, batch: int, batch_last: bool) -> View:
    """The strides of a contiguous tensor, such as a copy or a new result."""
    return View(1, batch) if batch_last else View(features, 1)


def _copy_shape(view: View | None, t, features: int, batch_last: bool) -> tuple[int, int] | None:
    """The shape of the copy that a tensor without a view needs."""
    if view is not None:
        return None
    batch = t.numel() // features
    return (features, batch) if batch_last else (batch, features)


def _used(stride: int, size: int) -> int:
    """A stride, 0 for a dimension of one entry, so that it does not limit the alignment."""
    return stride if size > 1 else 0


def _features(sizes: tuple[int, int, int], stride: int) -> tuple[int, int, int]:
    """Strides of i, l and k among features (i, k, l) of sizes (a, c, d)."""
    a, c, d = sizes
    return _used(c * d * stride, a), _used(stride, d), _used(d * stride, c)


def problem_of(
    descriptor: KroneckerSparse, call: Call, x, weight, out
) -> tuple[Problem, tuple | None, bool]:
    """The problem of a checked call: rows n, columns j, depth k; the shape of the copy that is read
    in the place of x, or None; and whether a given ``out`` is written by a copy."""
    (a, b, c, d), batch, last = descriptor.pattern, call.batch, descriptor.batch_last
    new = copied_view(descriptor.out_features, batch, last)
    seen, written = view_of(x, last), new if out is None else view_of(out, last)
    copy, apart = _copy_shape(seen, x, descriptor.in_features, last), written is None
    seen, written = seen or copied_view(descriptor.in_features, batch, last), written or new
    block, lane, depth = _features((a, c, d), seen.feature)
    left = Layout(block, lane, _used(seen.batch, batch), depth, seen.alignment)
    i, j, k, l = (_used(s, n) for s, n in zip(weight.stride(), weight.shape, strict=True))
    right = Layout(i, l, j, k, _alignment(weight))
    block, lane, column = _features((a, b, d), written.feature)
    rows = _used(written.batch, batch)
    target = OutLayout(block, lane, rows, column, written.alignment)
    precision = kernel_precision(descriptor.precision, call.dtype)
    kind = KERNEL_TYPES[call.dtype]
    problem = Problem(a, d, batch, b, c, left, right, target, kind, precision)
    return problem, copy, apart


def signature(problem: Problem) -> bytes:
    """What calls must share for one kernel to be fastest."""
    return encode((FAMILY, problem))


def lower(
    epilogue: tuple, problem: Problem, device: int, torch_may: bool = False
) -> Lowered | None:
    """The kernels of a problem on a device: the tuned ones, else by rule; None for torch, where it
    may compute the call."""
    arch, choice = arch_of(device), None
    candidates = choose.candidates(problem, arch)
    # With one kernel, torch is a second candidate.
    if torch_may or len(candidates) > 1 or tuned.is_trial():
        choice = tuned.choice(FAMILY, model(device), signature(problem), lambda: candidates)
    return lower_on(
        lambda count: choose.lower(epilogue, problem, arch, count, choice, torch_may), device
    )


def torch_may(descriptor: KroneckerSparse, call: Call, x: torch.Tensor) -> bool:
    """Whether torch's product may compute a call whose tensors it reads and writes in place:
    float32, with nothing behind the product. Not where torch's settings permit TF32, whatever the
    descriptor says, nor where they ask for algorithms that cuBLAS lacks; and not in a stream's
    capture that nothing prepared, as cuBLAS may have to be loaded."""
    if descriptor.epilogue or call.dtype is not torch.float32 or float32_precision() != "fp32":
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    return x.is_meta or not torch.cuda.is_current_stream_capturing()


def plan(call: Call, descriptor: KroneckerSparse, operands: tuple, out, parameters) -> ProductPlan:
    """The plan of a checked call on CUDA tensors, its kernels loaded."""
    x, weight = operands
    device = x.get_device()
    arch_of(device)  # an old device is refused for an empty result too
    problem, copy, apart = problem_of(descriptor, call, x, weight, out)
    request, lowered = (descriptor, operands, out, parameters), None
    if call.batch:
        may = copy is None and not apart and torch_may(descriptor, call, x)
        lowered = lower(descriptor.epilogue, problem, device, may)
        if may and rehearsal.of(device) is not None:
            # A stream that captures a call without a plan has the kernels in torch's place.
            lower(descriptor.epilogue, problem, device)
        if lowered is None:
            return _torch_plan(call, request, problem)
    placing = place if copy is None else partial(placed_copies, (copy, None))
    return make_plan(operands, call, request, placing, ("left", "right"), lowered, apart)


def _torch_plan(call: Call, request: tuple, problem: Problem) -> ProductPlan:
    """The plan of a call that torch computes."""
    result = allocator(call.out_shape, call.dtype, call.device)
    compute = partial(by_product, result, _matrices(problem))
    return make_plan(request[1], call, request, place, (), None, False, compute)


def _matrices(problem: Problem) -> tuple[tuple, tuple, tuple]:
    """Sizes and strides of x, of the weight and of the result as torch multiplies them: a batch of
    blocks."""
    a, b, c, n = problem.blocks, problem.columns, problem.depth, problem.rows
    left, right, out = problem.left, problem.right, problem.out
    x_row, row = (left.line, out.row) if n > 1 else (a * c, a * b)
    x, y = ((a, n, c), (c, x_row, 1)), ((a, n, b), (b, row, 1))
    return x, ((a, c, b), (b * c, 1, right.line)), y


def by_product(
    result: Callable[[], torch.Tensor],
    matrices: tuple[tuple, tuple, tuple],
    descriptor: KroneckerSparse,
    operands: tuple,
    parameters: dict,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A product with d = 1 by torch's batched product of views of these sizes and strides, into
    ``out`` or a new ``result()``."""
    x, weight = operands
    if events.listening():
        message = f"{FAMILY} on {x.device}: no kernel, computed by torch"
        events.emit("torch", "", "", message)
    y = result() if out is None else out
    with no_autocast(x):
        left, right, target = (
            t.as_strided(*view) for t, view in zip((x, weight, y), matrices, strict=True)
        )
        torch.bmm(left, right, out=target)
    return y


def place(operands: tuple) -> tuple[list[int], None]:
    """Addresses of both operands."""
    left, right = operands
    return [left.data_ptr(), right.data_ptr()], None


def placed_copies(shapes: tuple, operands: tuple) -> tuple[list[int], list]:
    """Addresses where an operand is copied to a shape, if one is given, and the operands."""
    read = [
        t if shape is None else t.reshape(shape) for t, shape in zip(operands, shapes, strict=True)
    ]
    return [t.data_ptr() for t in read], read


# The gradient of a weight.


class GradientPlan(NamedTuple):
    """What a gradient of a weight of one signature needs besides its pointers."""

    index: int  # of the device
    place: Callable  # of both operands: their addresses, and what to keep until the launch
    result: Callable[[], torch.Tensor]  # makes a new one
    launch: Callable[..., None]  # of the steps, given addresses: grad, x, out


def gradient_plan(
    call: Call, grad: torch.Tensor, x: torch.Tensor, pattern, batch_last: bool, precision
) -> GradientPlan:
    """The plan of a checked call, its kernels loaded."""
    device = x.get_device()
    arch_of(device)
    problem, copies = gradient_problem(grad, x, pattern, batch_last, precision)
    placing = place if copies == [None, None] else partial(placed_copies, copies)
    if not problem.depth:  # an empty sum
        zeros = partial(torch.zeros, pattern, dtype=x.dtype, device=x.device)
        return GradientPlan(device, placing, zeros, lambda addresses: None)
    lowered = lower((), problem, device)
    steps, inner = load_steps(lowered.steps, ("left", "right", "out"), device)
    launch = launcher(steps, inner, x.device, lowered.workspace)
    return GradientPlan(device, placing, allocator(pattern, x.dtype, x.device), launch)


def gradient_problem(
    grad: torch.Tensor, x: torch.Tensor, pattern, batch_last: bool, precision
) -> tuple[Problem, list[tuple | None]]:
    """The gradient of a weight: rows j, columns k, depth n; contiguous (a, b, c, d). And for both
    operands the shape of the copy that is read in its place, or None."""
    a, b, c, d = pattern
    batch = grad.numel() // (a * b * d)
    layouts, copies = [], []
    for t, features in ((grad, b), (x, c)):
        view = view_of(t, batch_last)
        copies.append(_copy_shape(view, t, a * features * d, batch_last))
        view = view or copied_view(a * features * d, batch, batch_last)
        block, lane, line = _features((a, features, d), view.feature)
        layouts.append(Layout(block, lane, line, _used(view.batch, batch), view.alignment))
    strides = (_used(b * c * d, a), _used(1, d), _used(c * d, b), _used(d, c))
    written = OutLayout(*strides, 16)
    kind, precision = KERNEL_TYPES[x.dtype], kernel_precision(precision, x.dtype)
    return Problem(a, d, b, c, batch, *layouts, written, kind, precision), copies
