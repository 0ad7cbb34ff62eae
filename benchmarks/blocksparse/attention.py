"""Attention over stored blocks: kernlib, its floor, FlexAttention, FlashAttention 4 where it is
installed (flash-attn-4), and all of the matrix by cuDNN.

TFLOP/s are 4 B H L^2 D density / time of a forward pass, 2.5 times as many operations of a backward
one. Errors are those of some rows of the first head: of the result, or of the gradient by q. What
is learned is in float32, and a gradient by it belongs to the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.harness import Row, Session, attempt
from benchmarks.common.timing import memory, relative_error, sample_rows
from kernlib import blocksparse

RATE = 768e12  # operations/s of dense products in half types, as cuBLAS reaches them
BACKWARD = 2.5  # times the operations of a forward pass
MUST_ERROR = 1e-2  # of weights and results in bfloat16
# Of a head dimension, blocks and pass: TFLOP/s at densities .5, .25 and .1.
MUST_TERAFLOPS = {
    (128, 128, "forward"): (560.0, 530.0, 480.0),
    (64, 128, "forward"): (400.0, 380.0, 340.0),
    (128, 64, "forward"): (None, None, 400.0),
    (128, 32, "forward"): (None, None, 200.0),
    (128, 16, "forward"): (None, None, 100.0),
    (128, 128, "backward"): (400.0, 370.0, 330.0),
}
DENSITIES = (0.5, 0.25, 0.1)
WINDOW_MUST = 0.2  # ms
# What may be learned beside q, k and v: scores, as ours has them, and axes of what they read.
LEARNED = {
    "bias": ("v + learned", ("head", "row", "col")),
    "slopes": ("v - learned * abs(row - col)", ("head",)),
}
COMPARED = (128, 32)  # blocks of which the kernels of other GPUs are measured
LARGE_BLOCKS = (64, 128)  # that FlexAttention and FlashAttention 4 have kernels for


class Problem(NamedTuple):
    """``length`` rows and columns, of which random blocks are stored, or those that a window of so
    many columns on each side meets. ``learned`` is one of LEARNED."""

    features: int  # of a head
    block: int
    density: float
    backward: bool = False
    length: int = 16384
    batch: int = 1
    heads: int = 16
    window: int | None = None
    learned: str | None = None

    @property
    def name(self) -> str:
        which = "backward" if self.backward else "forward"
        if self.learned:
            plain = self._replace(learned=None).name.removeprefix("attention ")
            batch = f"batch={self.batch} " * (self.batch > 1)
            return f"attention {self.learned} {self.length} {batch}{plain}"
        if self.window:
            return f"attention window={self.window} {which} bf16"
        sizes = f"hd={self.features} block={self.block} density={self.density:g}"
        return f"attention {sizes} {which} bf16"

    @property
    def is_compared(self) -> bool:
        """Whether the kernels of other GPUs are measured too."""
        return (self.block in COMPARED and self.density == DENSITIES[-1]) or self.window is not None

    @property
    def must(self) -> float | None:
        """Milliseconds."""
        if self.learned:
            return None
        if self.window:
            return None if self.backward else WINDOW_MUST
        which = "backward" if self.backward else "forward"
        known = MUST_TERAFLOPS.get((self.features, self.block, which), ())
        rate = dict(zip(DENSITIES, known, strict=False)).get(self.density)
        return None if rate is None else self.operations(self.density) / (rate * 1e9)

    def operations(self, density: float) -> float:
        """Of the products, where so much of the matrix counts."""
        found = 4.0 * self.batch * self.heads * self.length**2 * self.features * density
        return found * (BACKWARD if self.backward else 1.0)

    def floor(self, density: float) -> tuple[float, str]:
        """Milliseconds, and what bounds them."""
        tensors = 8 if self.backward else 4
        moved = tensors * self.batch * self.heads * self.length * self.features * 2
        if self.learned == "bias":  # read where blocks are stored, its gradient written everywhere
            moved += 4 * self.heads * self.length**2 * (density + self.backward)
        moving, computing = moved / memory().copied * 1e3, self.operations(density) / RATE * 1e3
        return max(moving, computing), "memory" if moving >= computing else "tensor cores"


def problems() -> list[Problem]:
    """All cases."""
    passes = (False, True)
    found = [
        Problem(features, block, density, backward)
        for features in (64, 128)
        for block in (128, 64, 32, 16)
        for density in DENSITIES
        for backward in passes
    ]
    found += [Problem(64, 64, 0.0, backward, 4096, 4, 16, 512) for backward in passes]
    return found + [
        Problem(64, 128, 0.25, True, length, batch, learned=learned)
        for learned, length, batch in (("bias", 4096, 1), ("bias", 4096, 4), ("slopes", 16384, 1))
    ]


def layout_of(problem: Problem, device: str = "cuda") -> blocksparse.Layout:
    """One mask for all batches; random ones differ between heads."""
    n, block = problem.length // problem.block, problem.block
    if problem.window:
        place = torch.arange(n, device=device)
        apart = (place[:, None] - place).abs()
        return blocksparse.Layout(apart * block - (block - 1) <= problem.window, block)
    generator = torch.Generator(device).manual_seed(0)
    mask = torch.rand(problem.heads, n, n, generator=generator, device=device) < problem.density
    return blocksparse.Layout(mask, block)


def tensors(problem: Problem, device: str = "cuda") -> list[torch.Tensor]:
    """q, k, v, and the gradient of the result."""
    generator = torch.Generator(device).manual_seed(1)
    shape = problem.batch, problem.heads, problem.length, problem.features
    return [
        torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_(i < 3)
        for i in range(4)
    ]


def learned_of(problem: Problem, device: str = "cuda") -> torch.Tensor | None:
    """What is learned beside q, k and v."""
    if problem.learned is None:
        return None
    if problem.learned == "slopes":
        head = torch.arange(problem.heads, device=device)
        return torch.exp2(-8.0 * (head + 1) / problem.heads).requires_grad_()
    generator = torch.Generator(device).manual_seed(2)
    shape = problem.heads, problem.length, problem.length
    return torch.randn(shape, generator=generator, device=device).mul_(0.5).requires_grad_()


def seen(problem: Problem, layout: blocksparse.Layout, rows: torch.Tensor) -> torch.Tensor:
    """(rows, columns): what some rows of the first head see."""
    mask = layout.mask()
    mask = mask[0] if mask.dim() == 3 else mask
    found = mask[rows // problem.block].repeat_interleave(problem.block, 1)
    if problem.window:
        columns = torch.arange(problem.length, device=rows.device)
        found &= (rows[:, None] - columns).abs() <= problem.window
    return found


def exact(problem: Problem, layout, rows: torch.Tensor, q, k, v, grad, learned=None):
    """The result, or the gradient by q, of some rows of the first head in float64."""
    q, k, v, grad = (t.detach()[0, 0].double() for t in (q, k, v, grad))
    scale = problem.features**-0.5
    logits = scale * q[rows] @ k.mT
    if problem.learned == "bias":
        logits += learned.detach()[0, rows].double()
    elif problem.learned == "slopes":
        columns = torch.arange(problem.length, device=rows.device)
        logits -= learned.detach()[0].double() * (rows[:, None] - columns).abs()
    weights = torch.where(seen(problem, layout, rows), logits, -math.inf).softmax(-1)
    out = weights @ v
    if not problem.backward:
        return out
    by_weights = grad[rows] @ v.mT - (grad[rows] * out).sum(-1, keepdim=True)
    return scale * (weights * by_weights) @ k


def timed(
    problem: Problem,
    session: Session,
    function: Callable,
    given: list[torch.Tensor],
    rows,
    wanted,
    learned: torch.Tensor | None = None,
) -> tuple[float, float]:
    """Milliseconds and error of ``function(q, k, v)``, or of its gradients, by what it has learned
    too."""
    *inputs, grad = given
    call, buffers = function, tuple(t.detach() for t in inputs)
    if problem.backward:
        y, buffers = _apart(function, inputs), (grad,)
        leaves = inputs if learned is None else [*inputs, learned]

        def call(grad):
            return torch.autograd.grad(y, leaves, grad, retain_graph=True)[0]

    error = relative_error(call(*buffers)[0, 0, rows], wanted)
    return session.time(call, buffers, in_graph=True), error


def _apart(function: Callable, inputs: list[torch.Tensor]) -> torch.Tensor:
    """A result on a stream of its own, which its gradient runs on too: of the default one a capture
    of the gradient's call must not wait."""
    if not inputs[0].is_cuda:
        return function(*inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = function(*inputs)
    torch.cuda.synchronize()
    return y


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    layout, given = layout_of(problem, device), tensors(problem, device)
    rows, learned = sample_rows(problem.length, device), learned_of(problem, device)
    wanted = exact(problem, layout, rows, *given, learned)
    density = layout.density
    if problem.window:
        density = seen(problem, layout, torch.arange(problem.length, device=device))
        density = density.float().mean().item()
    more = {"window": problem.window} if problem.window else {}
    if learned is not None:
        score, axes = LEARNED[problem.learned]
        more = {"score": score, "axes": {"learned": axes}, "learned": learned}

    def ours(q, k, v):
        return blocksparse.attention(q, k, v, layout, **more)

    ms, error = timed(problem, session, ours, given, rows, wanted, learned)
    row = Row(problem.name, "ms", ms, *problem.floor(density), error=error)
    row.must, row.must_error = problem.must, MUST_ERROR
    for name, make in rivals(problem, layout, learned).items():
        run = partial(_rival, problem, session, make, given, rows, wanted, learned)
        found = attempt(name, problem.name, run)
        if found is not None:
            row.rivals[name], error = found
            if name != DENSE:
                row.rival_errors[name] = error
    return row


def _rival(problem, session, make: Callable, given, rows, wanted, learned) -> tuple[float, float]:
    return timed(problem, session, make(), given, rows, wanted, learned)


DENSE = "cudnn, all of the matrix"


def rivals(problem: Problem, layout: blocksparse.Layout, learned=None) -> dict[str, Callable]:
    """What makes each rival's function, by its name."""
    found: dict[str, Callable] = {} if problem.learned else {DENSE: lambda: _cudnn}
    if problem.block in LARGE_BLOCKS:
        found["FlexAttention"] = lambda: _flex(problem, layout, learned)
        is_there = find_spec("flash_attn") and find_spec("flash_attn.cute")
        if is_there and not problem.learned:
            found["FlashAttention 4"] = lambda: _flash(problem, layout)
    return found


def _cudnn(q, k, v):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def lists(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each line of (1, heads, lines, blocks) the count of its stored blocks, and their places in
    front of those of the others."""
    stored = mask.int()
    order = stored.argsort(dim=-1, descending=True, stable=True).int()
    return stored.sum(-1).int(), order


def _mask(layout: blocksparse.Layout) -> torch.Tensor:
    mask = layout.mask()
    return mask.expand(1, *mask.shape) if mask.dim() == 3 else mask[None, None]


def _flex(problem: Problem, layout: blocksparse.Layout, learned=None) -> Callable:
    """FlexAttention of the same blocks, of which it has all but a window's ends whole."""
    from torch._functorch import config
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    config.donated_buffer = False  # a gradient is taken more than once
    torch.compiler.reset()  # after 8 problems of one process it would be compiled for no more
    compiled = torch.compile(flex_attention)
    if problem.window:
        width = problem.window
        mask = create_block_mask(
            lambda b, h, i, j: (i - j).abs() <= width, None, None, problem.length, problem.length
        )
    else:
        count, order = lists(_mask(layout))
        none = torch.zeros_like(count), torch.zeros_like(order)
        mask = BlockMask.from_kv_blocks(*none, count, order, BLOCK_SIZE=problem.block)
    options = None  # its tiles, which may not be larger than blocks
    if problem.block < 128:
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
        options = dict.fromkeys(names, problem.block)
    given = {"score_mod": _modified(problem, learned), "block_mask": mask}
    return lambda q, k, v: compiled(q, k, v, **given, kernel_options=options)


def _modified(problem: Problem, learned: torch.Tensor | None) -> Callable | None:
    """LEARNED, as FlexAttention has it."""
    if problem.learned == "bias":
        return lambda v, b, h, i, j: v + learned[h, i, j]
    if problem.learned == "slopes":
        return lambda v, b, h, i, j: v - learned[h] * (i - j).abs()
    return None


def _flash(problem: Problem, layout: blocksparse.Layout) -> Callable:
    """FlashAttention 4 of the same blocks, all whole, or of a window, which it knows itself. It has
    heads behind the rows."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    given: dict = {"window_size": (problem.window,) * 2}
    if not problem.window:
        given, mask = {}, _mask(layout)
        for name, lines in (("", mask), ("_bwd", mask.mT.contiguous())):
            count, order = lists(lines)
            none = torch.zeros_like(count), torch.zeros_like(order)
            given["block_sparse_tensors" + name] = BlockSparseTensorsTorch(
                *none, count, order, block_size=(problem.block,) * 2
            )

    def attend(q, k, v):
        return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **given)[0].transpose(1, 2)

    return attend
