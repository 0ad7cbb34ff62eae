"""Ways to products and softmax of block-sparse matrices: kernlib's, the dense ones of torch, its
BSR tensors by Triton's kernels, its grouped products, and the blksprs project.

Each is a :class:`Way` made for a case: what is prepared once, such as blksprs's caches of a layout,
its own form of the operands, and tuning, is not timed.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.blocksparse.problems import Problem, dense, opened
from kernlib import blocksparse
from kernlib.blocksparse import Layout

TUNED = "dsd", 4096, 0.5  # mode, n and density at which BSR is tuned: a case takes 10 s
# Where a search for the parameters of torch's BSR kernel begins, and what it tries of each.
BSR_START = {"SPLIT_N": 32, "num_warps": 4, "num_stages": 3, "GROUP_SIZE_ROW": 4}
BSR_VALUES = {
    "SPLIT_N": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
    "GROUP_SIZE_ROW": (1, 2, 4, 8),
}
FOUND: dict[int, dict[str, int]] = {}  # by size of block: where the next search begins


class Way(NamedTuple):
    """``call(*buffers)`` and how its result is read as that of ours."""

    call: Callable
    buffers: tuple
    read: Callable[[torch.Tensor], torch.Tensor] = lambda found: found


Operands = tuple[torch.Tensor, ...]


def ours(problem: Problem, layout: Layout, operands: Operands) -> Way:
    if problem.mode == "softmax":
        return Way(lambda x, out: blocksparse.softmax(x, layout, out=out), operands)
    multiply = product(problem, layout)
    return Way(lambda a, b, out: multiply(a, b, out=out), operands)


def product(problem: Problem, layout: Layout) -> Callable:
    """``f(a, b, out=None)``"""
    call = getattr(blocksparse, problem.mode)
    named = {**problem.flags, "precision": "fp32" if problem.kind == "fp32" else None}
    return lambda a, b, out=None: call(a, b, layout, out=out, **named)


def rivals(problem: Problem, layout: Layout, operands: Operands) -> dict[str, Callable[[], Way]]:
    """What makes each rival of a case."""
    given = problem, layout, operands
    if problem.is_portable:  # beside the same by the GPU's own kernels
        return {}
    has_blksprs = _finds("blksprs", "triton")
    if problem.mode == "softmax":
        found = {"torch": partial(dense_softmax, *given)}
        if has_blksprs and problem.kind == "fp32":  # it takes no other
            found["blksprs"] = partial(blksprs_softmax, *given)
        return found
    found = {"cublas": partial(cublas, *given)}
    if problem.section == "diagonal":
        found["grouped_mm"] = partial(grouped, *given)
        if problem.kind != "bf16":  # the dtype that it has been made for
            found["grouped_mm bf16"] = partial(grouped, *given, torch.bfloat16)
    at = problem.mode, problem.n, problem.density
    if problem.section == "table" and at == TUNED and problem.kind == "fp16":
        found["bsr"] = partial(bsr, *given)
    if has_blksprs and problem.kind == "fp16" and problem.section in ("table", "sdd", "cubes"):
        found["blksprs"] = partial(blksprs, *given)
    return found


def _finds(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) for name in modules)


# Dense.


def cublas(problem: Problem, layout: Layout, operands: Operands) -> Way:
    """The product of the same matrices laid out, of which that of sdd is whole."""
    a, b, out = operands
    sparse = problem.mode == "sdd"
    if sparse:
        out = out.new_empty((*a.shape[:-2], *layout.shape))

    def call(a, b, out):
        return torch.matmul(*opened(problem, a, b), out=out)

    buffers = (*dense(problem, layout, a, b), out)
    return Way(call, buffers, layout.to_blocks) if sparse else Way(call, buffers)


def dense_product(problem: Problem) -> Callable:
    """``f(a, b)`` of matrices that are laid out."""
    return lambda a, b: torch.matmul(*opened(problem, a, b))


def dense_softmax(problem: Problem, layout: Layout, operands: Operands) -> Way:
    """That of the matrix with -inf where no block is stored."""
    x, _ = operands
    away = layout.to_dense(torch.ones_like(x)) == 0
    whole = layout.to_dense(x).masked_fill_(away, -torch.inf)
    return Way(lambda whole: F.softmax(whole, -1), (whole,), layout.to_blocks)


def grouped(
    problem: Problem, layout: Layout, operands: Operands, dtype: torch.dtype | None = None
) -> Way:
    """torch's product of groups, each with a matrix of its own along the diagonal."""
    values, b, _ = operands
    size = round(problem.density * problem.n)
    matrix = layout.to_dense(values).to(dtype or values.dtype)
    starts = range(0, problem.n, size)
    groups = torch.stack([matrix[at : at + size, at : at + size] for at in starts])

    def call(groups, b):
        return torch._grouped_mm(groups, b.unflatten(0, (-1, size))).flatten(0, 1)

    return Way(call, (groups, b.to(matrix.dtype)))


# torch's BSR tensors, which multiply from the left: of the other mode the transposes are taken.


def bsr(problem: Problem, layout: Layout, operands: Operands) -> Way:
    a, b, _ = operands
    turned = problem.mode == "dds"
    values, other = (b, a) if turned else (a, b)
    if turned:
        values = values.mT[layout.col_order.long()].contiguous()
        layout = layout.transpose()
    starts, columns = layout.row_starts, layout.tensors[4]
    multiply = _bsr_multiply(problem, layout) if other.is_cuda else torch.matmul

    def call(values, other):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BSR is in beta state
            matrix = torch.sparse_bsr_tensor(
                starts, columns, values, layout.shape, check_invariants=False
            )
            return multiply(matrix, other.mT).mT if turned else multiply(matrix, other)

    return Way(call, (values, other))


def _bsr_multiply(problem: Problem, layout: Layout) -> Callable:
    """torch's Triton kernel by the parameters that torch has for this GPU, or the best found."""
    from torch.sparse import _triton_ops

    best: dict[str, int] = {}

    def multiply(matrix, other):
        if not best:
            block = matrix.values().shape[-1]
            begin = FOUND.get(block, BSR_START)
            best.update(_known(matrix, other) or searched(partial(run, matrix, other), begin))
            FOUND[block] = best
        return run(matrix, other, best)

    def run(matrix, other, meta):
        out = other.new_empty((matrix.shape[0], other.shape[1]))
        return _triton_ops.bsr_dense_addmm(out, matrix, other, beta=0, out=out, meta=meta)

    return multiply


def _known(matrix: torch.Tensor, other: torch.Tensor) -> dict | None:
    """What torch keeps for such a product on this GPU."""
    from torch.sparse import _triton_ops_meta

    height, width = matrix.values().shape[-2:]
    rows, cols = matrix.shape
    sparsity = round(1 - matrix.values().numel() / (rows * cols), 2)
    key = rows, cols, other.shape[1], height, width, True, False, True
    version = 0, other.dtype, sparsity
    return _triton_ops_meta.get_meta("bsr_dense_addmm", key, version=version, exact=True)


def searched(run: Callable[[dict], object], begin: dict[str, int]) -> dict:
    """The best parameters on the way from ``begin`` to a neighbour that is faster, as long as there
    is one. torch's own search tries forty around each, some minutes of compiling a case."""
    times: dict[tuple, float] = {}

    def timed(meta: dict) -> float:
        key = tuple(meta.values())
        if key not in times:
            times[key] = least_milliseconds(partial(run, meta))
        return times[key]

    best, before = dict(begin), None
    while best != before:
        before = best
        for name, values in BSR_VALUES.items():
            at = values.index(best[name])
            near = [{**best, name: value} for value in values[max(0, at - 1) : at + 2]]
            best = min(near, key=timed)
    if timed(best) == float("inf"):
        raise ValueError("no parameters of torch's BSR kernel run")
    return best


def least_milliseconds(call: Callable, count: int = 5) -> float:
    """The least of some calls; infinite for what needs more than the GPU has."""
    times = []
    try:
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    except Exception:  # of Triton: out of resources
        return float("inf")
    return min(times)


# blksprs, whose dense matrices are block-sparse ones with every block.


def blksprs(problem: Problem, layout: Layout, operands: Operands) -> Way:
    import blksprs as project

    project.utils.disable_validation()  # it waits for the device
    (rows, cols), depth, block = layout.shape, problem.columns, layout.block[0]
    sizes = {  # of the result, a and b; None for the matrix of the layout
        "dsd": ((rows, depth), None, (cols, depth)),
        "dds": ((depth, cols), (depth, rows), None),
        "sdd": (None, (rows, depth), (depth, cols)),
    }[problem.mode]
    every = [
        blocksparse.dense(*size, block, layout.heads, layout.device) if size else layout
        for size in sizes
    ]
    given = [
        of.to_blocks(t) if size else t
        for size, of, t in zip(sizes[1:], every[1:], operands[:2], strict=True)
    ]
    masks = [_mask(of) for of in every]
    kept: dict = {}

    def call(a, b):
        found = project.ops.matmul(a, masks[1], b, masks[2], masks[0], block, kept)
        return found.as_subclass(torch.Tensor)

    read = every[0].to_dense if problem.mode != "sdd" else lambda found: found
    return Way(call, tuple(given), read)


def blksprs_softmax(problem: Problem, layout: Layout, operands: Operands) -> Way:
    import blksprs as project

    project.utils.disable_validation()
    mask, kept = _mask(layout), {}

    def call(x):
        found = project.ops.softmax(x, mask, layout.block[0], layout_cache=kept)
        return found.as_subclass(torch.Tensor)

    return Way(call, operands[:1])


def _mask(layout: Layout) -> torch.Tensor:
    """(heads, RB, CB)"""
    found = layout.mask()
    return found if layout.heads is not None else found[None]
