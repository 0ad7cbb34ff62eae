"""Plans of block-sparse attention and of its gradient: the problem that lowering sees, and its
kernels, loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from kernlib import events
from kernlib.canonical import encode
from kernlib.descriptors.score.bounds import Window, structure
from kernlib.families.blocksparse.attention.arguments import (
    Options,
    Sizes,
    check_lengths,
    dtypes_of,
    refuse_overlap,
    sizes_of,
)
from kernlib.families.blocksparse.attention.descriptor import AXES, BlockSparseAttention
from kernlib.families.blocksparse.checks import scale_of
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering.attention import choose
from kernlib.families.blocksparse.lowering.attention.problem import (
    Attention,
    AttentionGradient,
    Collected,
    Operand,
    Score,
    View,
)
from kernlib.families.blocksparse.lowering.attention.score_source import CAPTURED, pointers
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.steps import Lowered
from kernlib.runtime import devices, tuned
from kernlib.runtime.arguments import address_of
from kernlib.runtime.devices import allocator, arch_of, lower_on, model
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.sequence import launcher, load_steps

# Operands in the order of parameter blocks, before those of a score; 0 for what is not there.
OPERANDS = ("row_bits", "q", "k", "v", "out", "lse", "rest")
GRADIENT_OPERANDS = (
    "row_bits", "col_bits", "q", "k", "v", "out", "lse", "rest", "grad", "grad_lse", "dq", "dk",
    "dv",
)  # fmt: skip
FAMILY = BlockSparseAttention.family
HALF_TYPES = (torch.float16, torch.bfloat16)
STEP, LEAST, MOST = 8, 16, 256  # features of a kernel, to which others are padded with zeros
CHUNK = 8  # elements of 16 bytes; strides are multiples of these

Allocator = Callable[[], torch.Tensor]


class Read(NamedTuple):
    """How a kernel reads a tensor: as it is, or a copy with ``features``."""

    features: int
    is_copied: bool

    def of(self, t: torch.Tensor) -> torch.Tensor:
        if not self.is_copied:
            return t
        if t.shape[-1] < self.features:
            return pad(t, (0, self.features - t.shape[-1])).contiguous()
        return t.clone(memory_format=torch.contiguous_format)


class AttentionPlan(NamedTuple):
    """What a call of one signature needs besides its pointers and numbers. ``apart``: a result is
    made of the kernel's by a copy. ``has_rest``: a score may make logits as large as floats are,
    whose log-sum-exp is two numbers."""

    index: int  # of the device
    device: torch.device
    sizes: Sizes
    reads: tuple[Read, ...]  # of q, k and v, empty where all are read as they are
    result: Allocator  # makes what kernels write
    lse: Allocator
    has_rest: bool
    apart: bool
    window: Window  # of the mask
    launch: Callable[..., None] | None  # None for a result without elements


class GradientPlan(NamedTuple):
    """The plan of a gradient. ``reads`` has out and grad too. ``made`` makes the gradients of q, k
    and v, None where not needed; ``cut`` is whether these are wider than the operands.
    ``collected`` makes those of captured tensors, by their places."""

    index: int
    device: torch.device
    sizes: Sizes
    reads: tuple[Read, ...]
    made: tuple[Allocator | None, ...]
    cut: bool
    collected: tuple[tuple[int, Allocator], ...]
    window: Window
    launch: Callable[..., None] | None


def _padded(features: int) -> int:
    """The features that a kernel has in place of so many."""
    return max(LEAST, ceil_div(features, STEP) * STEP)


def takes(descriptor, operands: tuple, options: Options, captured: dict) -> bool:
    """Whether kernels compute a checked call of CUDA tensors."""
    described = problem_of(descriptor, operands, None, options, captured)
    return described is not None and choose.takes(described[0], arch_of(operands[1].get_device()))


def problem_of(
    descriptor, operands: tuple, out, options: Options, captured: dict
) -> tuple[Attention, tuple[Read, ...], bool] | None:
    """The problem of a checked call, how q, k and v are read, and whether a result is made by a
    copy; None for calls that no kernel computes, whatever the GPU."""
    layout, q, k, v = operands
    sizes = sizes_of(operands)
    dtypes = dtypes_of(descriptor, captured)
    is_known = q.dtype in HALF_TYPES and all(dtype in CAPTURED for dtype in dtypes)
    if (
        not is_known
        or max(sizes.features, sizes.values) > MOST
        or not (sizes.keys and sizes.values)
    ):
        return None  # of no keys, or no values, there is an lse to write all the same
    features, values = _padded(sizes.features), _padded(sizes.values)
    seen = [_seen(t, width) for t, width in ((q, features), (k, features), (v, values))]
    shape = (*sizes.out[:3], values)
    written = _new(shape)
    apart = values != sizes.values
    if out is not None:
        target, read = _seen(out, values)
        apart = read.is_copied
        written = written if apart else target
    heads = _layout_strides(layout, sizes)
    views = tuple([_captured(descriptor, name, captured[name]) for name in descriptor.names])
    problem = Attention(
        dtype=DTYPE_NAMES[q.dtype],
        blocks=layout.sizes,
        batch=sizes.batch,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        queries=sizes.queries,
        keys=sizes.keys,
        features=features,
        values=values,
        layout_batch=heads[0],
        layout_head=heads[1],
        q=seen[0][0],
        k=seen[1][0],
        v=seen[2][0],
        out=written,
        score=score_of(descriptor, dtypes, (), _packed(descriptor, views)),
        captured=views,
    )
    return problem, tuple(read for _, read in seen), apart


def window_of(descriptor: BlockSparseAttention, dtypes: tuple[str, ...]) -> Window:
    """The window in the mask."""
    mask = descriptor.expression.trees(dtypes).mask
    return Window() if mask is None else structure(mask)


def score_of(
    descriptor: BlockSparseAttention,
    dtypes: tuple[str, ...],
    by: Iterable[str] = (),
    packed: Iterable[str] = (),
) -> Score:
    """The score for lowering, by the dtypes of captured tensors, with its derivatives ``by`` some
    of them. ``packed`` are those whose columns lie side by side."""
    expression, window = descriptor.expression, window_of(descriptor, dtypes)
    trees = expression.trees(dtypes)._replace(mask=window.rest)
    score = Score()
    if trees != (None, None):
        from kernlib.families.blocksparse.lowering.attention import score_struct  # 2 ms

        score = score_struct.score_of(expression, dtypes, by, packed, trees)
    is_causal = (window.left, window.right) == (None, 0)
    is_window = (window.left, window.right) != (None, None) and not is_causal
    return score._replace(
        causal=descriptor.causal or is_causal,
        window=descriptor.window or is_window,
        lengths=descriptor.lengths,
        dropout=descriptor.dropout,
    )


def gradient_of(
    descriptor, operands: tuple, out, options: Options, captured: dict, grads: tuple, needs: tuple
) -> tuple[AttentionGradient, tuple[Read, ...]]:
    """The problem of a gradient that kernels compute, and how q, k, v, out and grad are read."""
    attention, reads, _ = problem_of(descriptor, operands, None, options, captured)
    sizes, (grad, grad_lse) = sizes_of(operands), grads
    result, read_out = _seen(out, attention.values)
    arrived, read_grad = _seen(grad, attention.values)
    _, q, k, v = operands
    widths = attention.features, attention.features, attention.values
    new = [_new((*t.shape[:3], width)) for t, width in zip((q, k, v), widths, strict=True)]
    names = [name for name, need in zip(descriptor.names, needs[3:], strict=True) if need]
    collected = tuple(_collected(descriptor, name, captured[name], sizes) for name in names)
    packed = _packed(descriptor, attention.captured)
    score = score_of(descriptor, dtypes_of(descriptor, captured), ("v", *names), packed)
    attention = attention._replace(out=result, score=score)
    rest = tuple(needs[:3]), grad_lse is not None, collected
    problem = AttentionGradient(attention, arrived, *new, *rest)
    return problem, (*reads, read_out, read_grad)


def _collected(descriptor, name: str, t: torch.Tensor, sizes: Sizes) -> Collected:
    batch, heads, rows, cols = shape = _collected_shape(descriptor, name, t, sizes)
    of_batch, of_head, of_row = _new(shape)[:3]
    axes = "pair" if rows > 1 and cols > 1 else "col" if cols > 1 else "row"
    if axes == "pair":  # which is added up over what it does not have
        of_batch, of_head = of_batch * (batch > 1), of_head * (heads > 1)
    view = View(of_batch, of_head, of_row * (rows > 1), int(cols > 1))
    return Collected(descriptor.names.index(name), axes, view)


def _collected_shape(descriptor, name: str, t: torch.Tensor, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a kernel's gradient by a captured tensor: that of a tensor with rows and
    columns, else one for each batch and head, and for each row unless it has columns alone."""
    axes = dict(descriptor.captured)[name]
    batch, heads, rows, cols = (t.shape[axes.index(n)] if n in axes else 1 for n in AXES)
    if rows > 1 and cols > 1:
        return batch, heads, rows, cols
    return sizes.batch, sizes.heads, 1 if cols > 1 else sizes.queries, cols


def _lower(problem: Attention, device: int) -> Lowered:
    """The kernels of a problem on a device: the tuned ones, else by rule."""
    arch = arch_of(device)
    candidates = partial(choose.candidates, problem, arch)
    # The bytes are what calls share that the same kernels are fastest for.
    choice = tuned.choice(FAMILY, model(device), encode((FAMILY, problem)), candidates)
    return lower_on(lambda count: choose.lower(problem, arch, count, choice), device)


def plan(call, descriptor, operands: tuple, out, options: Options, captured: dict) -> AttentionPlan:
    """The plan of a checked call on CUDA tensors, its kernels loaded."""
    q, sizes = operands[1], sizes_of(operands)
    index = q.get_device()
    problem, reads, apart = problem_of(descriptor, operands, out, options, captured)
    launch = None
    if call.count:
        lowered = _lower(problem, index)
        launch = _loaded(lowered, (*OPERANDS, *pointers(problem.score)), q)
    result = allocator((*sizes.out[:3], problem.values), q.dtype, q.device)
    lse = allocator(sizes.out[:3], torch.float32, q.device)
    window = window_of(descriptor, dtypes_of(descriptor, captured))
    copies = reads if any(read.is_copied for read in reads) else ()
    has_rest = problem.score.has_score
    return AttentionPlan(
        index, q.device, sizes, copies, result, lse, has_rest, apart, window, launch
    )


def gradient_plan(
    call, descriptor, operands: tuple, saved: tuple, options, captured: dict, grads, needs
) -> GradientPlan:
    """The plan of a gradient on CUDA tensors, its kernels loaded."""
    q, sizes, out = operands[1], sizes_of(operands), saved[0]
    index = q.get_device()
    problem, reads = gradient_of(descriptor, operands, out, options, captured, grads, needs)
    launch = None
    if call.count:
        arch = arch_of(index)
        lowered = lower_on(lambda count: choose.lower(problem, arch, count), index)
        places = [f"collected{place}" for place in range(len(problem.collected))]
        names = (*GRADIENT_OPERANDS, *places, *pointers(problem.attention.score))
        launch = _loaded(lowered, names, q)
    attention = problem.attention
    widths = attention.features, attention.features, attention.values
    makers = tuple(
        allocator((*t.shape[:3], width), t.dtype, t.device) if need else None
        for t, width, need in zip(operands[1:], widths, needs[:3], strict=True)
    )
    names = descriptor.names
    collected = tuple(
        (entry.index, _zeros(_collected_shape(descriptor, name, captured[name], sizes), q.device))
        for entry in problem.collected
        for name in (names[entry.index],)
    )
    window = window_of(descriptor, dtypes_of(descriptor, captured))
    copies = reads if any(read.is_copied for read in reads) else ()
    cut = widths != (sizes.features, sizes.features, sizes.values)
    return GradientPlan(index, q.device, sizes, copies, makers, cut, collected, window, launch)


def _loaded(lowered: Lowered, operands: tuple[str, ...], q: torch.Tensor) -> Callable:
    """A function that launches the kernels, given a list of the operands' addresses and the
    numbers."""
    steps, inner = load_steps(lowered.steps, operands, q.get_device())
    return launcher(steps, inner, q.device, lowered.workspace)


def _zeros(shape: tuple[int, ...], device: torch.device) -> Allocator:
    return lambda: torch.zeros(shape, dtype=torch.float32, device=device)


# Tensors as kernels see them.


def _seen(t: torch.Tensor, features: int) -> tuple[Operand, Read]:
    """A tensor, or its copy: kernels read and write 16 bytes at once."""
    strides = [n if size > 1 else 0 for n, size in zip(t.stride(), t.shape, strict=True)]
    fits = t.shape[3] == features and (t.shape[3] == 1 or t.stride(3) == 1)
    fits = fits and all(stride % CHUNK == 0 for stride in strides[:3])
    if fits and not address_of(t) & 15:
        return Operand(*strides[:3]), Read(features, False)
    return _new((*t.shape[:3], features)), Read(features, True)


def _new(shape: tuple[int, ...]) -> Operand:
    return Operand(*(math.prod(shape[index:]) for index in (1, 2, 3)))


def _packed(descriptor: BlockSparseAttention, views: tuple[View, ...]) -> list[str]:
    """The captured tensors whose columns lie side by side."""
    return [name for name, view in zip(descriptor.names, views, strict=True) if view.col == 1]


def _captured(descriptor: BlockSparseAttention, name: str, t: torch.Tensor) -> View:
    """Strides along the axes that it has."""
    axes = dict(descriptor.captured)[name]
    by_axis = dict(zip(axes, zip(t.shape, t.stride(), strict=True), strict=True))
    steps = [by_axis.get(axis, (1, 0)) for axis in AXES]
    return View(*(stride if size > 1 else 0 for size, stride in steps))


def _layout_strides(layout: Layout, sizes: Sizes) -> tuple[int, int]:
    """From one batch and one head to the next, in heads of the layout."""
    if layout.heads is None:
        return 0, 0
    return (0 if layout.heads == sizes.heads else sizes.heads), 1


# The launch.


def launch(plan: AttentionPlan, descriptor, operands: tuple, out, options: Options, captured):
    """The result of a call by its plan."""
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return launch(plan, descriptor, operands, out, options, captured)
    layout, q, k, v = operands
    if out is not None:
        refuse_overlap(operands, out, options, captured)
        if not out.is_inference():  # inference tensors have no version
            torch.autograd.graph.increment_version(out)
    target = plan.result() if out is None or plan.apart else out
    lse = plan.lse() if options.lse else None
    rest = plan.lse() if options.lse and plan.has_rest else None
    if plan.launch is not None:
        numbers, scale = _numbers(plan, options)
        if plan.reads:
            q, k, v = (read.of(t) for read, t in zip(plan.reads, (q, k, v), strict=True))
        addresses = [
            layout.addresses[0], q.data_ptr(), k.data_ptr(), v.data_ptr(), target.data_ptr(),
            0 if lse is None else lse.data_ptr(), 0 if rest is None else rest.data_ptr(),
        ]  # fmt: skip
        behind = ()
        if descriptor.lengths or captured:
            behind = _behind(plan, descriptor, options, captured)
            for t in behind:
                addresses.append(t.data_ptr())
        plan.launch(addresses, numbers)
        del q, k, v, scale, behind  # the stream orders the reuse of their memory behind the launch
    if plan.apart:
        cut = target[..., : plan.sizes.values]
        target = cut.contiguous() if out is None else out.copy_(cut)
    return target, lse, rest


def launch_gradient(
    plan: GradientPlan, descriptor, operands: tuple, saved: tuple, options, captured, grads, needs
) -> list:
    """The gradients of a call by their plan."""
    if devices.current_device() != plan.index:
        request = descriptor, operands, saved, options, captured, grads, needs
        with torch.cuda.device(plan.index):
            return launch_gradient(plan, *request)
    layout, *tensors = operands
    (out, lse, rest), (grad, grad_lse) = saved, grads
    results = [None if make is None else make() for make in plan.made]
    collected = [make() for _, make in plan.collected]
    if plan.launch is None:  # of no queries: keys have gradients of 0
        results = [t if t is None else t.zero_() for t in results]
    else:
        numbers, scale = _numbers(plan, options)
        inputs = [*tensors, out, grad]
        if plan.reads:
            inputs = [read.of(t) for read, t in zip(plan.reads, inputs, strict=True)]
        behind = _behind(plan, descriptor, options, captured)
        slope = None if grad_lse is None else grad_lse.contiguous()
        row_bits, _, col_bits = layout.addresses[:3]
        pointed = *inputs[:4], lse, rest, inputs[4], slope, *results, *collected, *behind
        places = [0 if t is None else t.data_ptr() for t in pointed]
        plan.launch([row_bits, col_bits, *places], numbers)
        del inputs, scale, behind, slope, pointed
    if plan.cut:
        results = [
            t if t is None or t.shape == like.shape else t[..., : like.shape[-1]].contiguous()
            for t, like in zip(results, tensors, strict=True)
        ]
    if not descriptor.captured:
        return results
    from kernlib.families.blocksparse.attention.pieces import summed

    parts = {index: t for (index, _), t in zip(plan.collected, collected, strict=True)}
    axes = dict(descriptor.captured)
    for place, name in enumerate(descriptor.names):
        part = parts.get(place)
        results.append(None if part is None else summed(part, axes[name], captured[name]))
    return results


def _numbers(plan, options: Options) -> tuple[list, torch.Tensor | None]:
    """Values and addresses of a launch's scalars, and a tensor to hold until then."""
    scale, address, tensor = options.scale, 0, None
    if type(scale) is not float or scale != scale:  # few calls have these
        scale, address, tensor = scale_of(scale, plan.device, torch.float32)
    left, right = options.window
    mask = plan.window
    left = left if mask.left is None else min(left, mask.left)
    right = right if mask.right is None else min(right, mask.right)
    seed = options.seed
    seeds = (0, seed.data_ptr()) if isinstance(seed, torch.Tensor) else (seed, 0)
    return [scale, address, left, 0, right, 0, options.dropout_p, 0, *seeds], tensor


def _behind(plan, descriptor, options: Options, captured: dict) -> list[torch.Tensor]:
    """The tensors whose addresses lie behind a kernel's own: lengths, captured ones."""
    tensors: list[torch.Tensor] = []
    if not (descriptor.lengths or captured):
        return tensors
    if descriptor.lengths:
        if events.watched:
            check_lengths(options, plan.sizes)
        pair = options.q_lengths, options.kv_lengths
        ends = plan.sizes.queries, plan.sizes.keys
        for lengths, other, end in zip(pair, pair[::-1], ends, strict=True):
            filled = other.new_full(other.shape, end) if lengths is None else lengths
            if filled.dtype is torch.int64:
                filled = filled.clamp(0, end)  # 2**31 would become a number below 0
            tensors.append(filled.to(torch.int32).contiguous())
    return [*tensors, *(captured[name] for name in descriptor.names)]
