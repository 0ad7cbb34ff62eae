"""What the benchmark of block-sparse matrices measures: layouts, tensors, floors, targets, values
in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.common.timing import memory, sample_rows
from kernlib import blocksparse
from kernlib.blocksparse import Layout


class Kind(NamedTuple):
    """A dtype, and operations/s that products of full tiles reach on an H200 in its arithmetic."""

    dtype: torch.dtype
    rate: float


KINDS = {
    "fp16": Kind(torch.float16, 768e12),
    "bf16": Kind(torch.bfloat16, 768e12),
    "fp32": Kind(torch.float32, 256e12),  # by three products of numbers of half the bits
}
BLOCKS, DENSITIES = (16, 32, 64, 128), (0.1, 0.25, 0.5)

# Targets. TFLOP/s on non-zero work by block and density, of 16-bit types and of fp32.
TERAFLOPS = {
    128: {0.1: 420, 0.25: 560, 0.5: 600},
    64: {0.1: 320, 0.25: 380, 0.5: 420},
    32: {0.1: 170, 0.25: 230, 0.5: 300},
    16: {0.1: 100, 0.25: 160, 0.5: 240},
}
FP32_TERAFLOPS = {64: 110, 128: 150}
FASTER = {(128, 0.5), (64, 0.5), (32, 0.25), (16, 0.1)}  # than the dense product by cuBLAS
TRANSPOSED_SHARE = 1.1  # of the time of the same product without transposes
SDD_SHARE = 1.3  # of the time of writing the blocks
GROUPED_SHARE = 1 / 0.93  # of torch._grouped_mm's time
DECODE_SHARE, DECODE_START_MS = 1.25, 0.003  # of the bytes' time, and what comes on top
TRAIN_SHARE = 3.2  # of the product's own time
ERROR_SHARE = 1.5  # of the error of the dense product by cuBLAS

TRANSPOSES = ("nn", "tn", "nt", "tt")  # BLAS's letters, of a and of b
HEADS, GROUPS, GROUP = 16, 32, 512
DECODED = (1, 8, 16)  # rows of x


class Problem(NamedTuple):
    """One case: a product or a softmax with a matrix of ``n`` x ``n`` in blocks, one or ``heads``.

    ``columns`` are those of the dense operand that are no lines of the matrix, or the depth of
    sdd."""

    section: str  # "table", "transposed", "sdd", "diagonal", "decode", "train", "softmax", ...
    mode: str  # "dsd", "dds", "sdd" or "softmax"
    n: int
    block: int
    density: float
    kind: str = "fp16"
    columns: int = 0
    transposes: str = "nn"
    heads: int | None = None

    @property
    def name(self) -> str:
        if self.section == "diagonal":
            size = f"{GROUPS}x{GROUP} block={self.block} N={self.columns}"
            return f"blocksparse block-diagonal {size} {self.kind}"
        words = ["blocksparse", *["train"] * self.trains, self._mode, str(self.n)]
        if self.columns not in (0, self.n):
            words.append(f"{'K' if self.mode == 'sdd' else 'N'}={self.columns}")
        words += [f"heads={self.heads}"] * (self.heads is not None)
        words += [f"block={self.block}", f"density={self.density:g}", self.kind]
        return " ".join(words + ["portable"] * self.is_portable)

    @property
    def _mode(self) -> str:
        if self.section == "decode":
            return "decode"
        return self.mode if self.transposes == "nn" else f"{self.mode} {self.transposes}"

    @property
    def plain(self) -> Problem:
        """The same product without transposes."""
        return self._replace(section="table", transposes="nn")

    @property
    def trains(self) -> bool:
        return self.section == "train"

    @property
    def is_portable(self) -> bool:
        """Whether it is measured with KERNLIB_PORTABLE=1, beside the kernels that a GPU has for
        itself."""
        return self.section == "portable"

    @property
    def dtype(self) -> torch.dtype:
        return KINDS[self.kind].dtype

    @property
    def flags(self) -> dict[str, bool]:
        """The arguments of a product that transpose."""
        pairs = zip(("transpose_a", "transpose_b"), self.transposes, strict=True)
        return {name: letter == "t" for name, letter in pairs}

    @property
    def live(self) -> int:
        """Blocks that are stored, of all heads."""
        return round(self.density * (self.n // self.block) ** 2) * (self.heads or 1)

    @property
    def operations(self) -> float:
        """On what is stored, those of gradients included; 0 of a softmax."""
        return 2.0 * self.live * self.block**2 * self.columns * (3 if self.trains else 1)

    def bytes(self) -> tuple[int, int]:
        """Read and written at least; gradients read both operands and that of the result, and write
        those of the operands."""
        values = self.live * self.block**2 * self.dtype.itemsize
        if self.mode == "softmax":
            return values, values
        dense = (self.heads or 1) * self.n * self.columns * self.dtype.itemsize
        read, written = (2 * dense, values) if self.mode == "sdd" else (values + dense, dense)
        return (2 * read + written, read + written) if self.trains else (read, written)

    def floor(self) -> tuple[float, str]:
        """Milliseconds, and what bounds them."""
        read, written = self.bytes()
        moving = (read / memory().read + written / memory().written) * 1e3
        computing = self.operations / KINDS[self.kind].rate * 1e3
        return max(moving, computing), "memory" if moving >= computing else "tensor cores"

    def must(self) -> float | None:
        """Milliseconds that are known without a measurement; see :func:`must` of ``run``."""
        if self.section == "table" and self.kind == "fp16":
            return self.operations / (TERAFLOPS[self.block][self.density] * 1e9)
        if self.section == "fp32":
            return self.operations / (FP32_TERAFLOPS[self.block] * 1e9)
        if self.section == "sdd":
            return SDD_SHARE * self.bytes()[1] / memory().written * 1e3
        if self.section == "decode":
            return DECODE_SHARE * self.floor()[0] + DECODE_START_MS
        return None


def problems() -> list[Problem]:
    """All cases."""
    grid = [(block, density) for block in BLOCKS for density in DENSITIES]
    both = ("dsd", "dds")
    found = [
        Problem("table", m, n, *at, "fp16", n) for n in (4096, 8192) for m in both for at in grid
    ]
    found += [
        Problem("table", mode, 4096, block, density, "bf16", 4096)
        for mode in both
        for block in (64, 128)
        for density in (0.25, 0.5)
    ]
    found += [
        Problem("transposed", mode, 4096, block, 0.25, kind, 4096, transposes)
        for kind, blocks in (("fp16", BLOCKS), ("bf16", (64, 128)))
        for block in blocks
        for mode in both
        for transposes in TRANSPOSES[1:]
    ]
    found += [
        Problem("fp32", mode, 4096, block, density, "fp32", 4096)
        for mode in both
        for block in FP32_TERAFLOPS
        for density in (0.25, 0.5)
    ]
    found += [
        Problem("diagonal", "dsd", GROUPS * GROUP, 128, 1 / GROUPS, kind, 4096)
        for kind in ("fp16", "bf16")
    ]
    return [*found, *_of_blocks(grid), *_beside(grid)]


def _of_blocks(grid: list) -> list[Problem]:
    """Whose result is block-sparse."""
    found = [
        Problem("sdd", "sdd", 4096, *at, "fp16", k, heads=HEADS) for k in (64, 128) for at in grid
    ]
    found += [
        Problem("sdd", "sdd", n, block, 0.5, "fp16", k)
        for n in (4096, 8192)
        for k in (64, 128)
        for block in BLOCKS
    ]
    found += [Problem("cubes", "sdd", 4096, block, 0.25, "fp16", 4096) for block in BLOCKS]
    found += [Problem("softmax", "softmax", 4096, *at, "fp16", heads=HEADS) for at in grid]
    return [
        *found,
        *(Problem("softmax", "softmax", 4096, b, 0.25, "fp32", heads=HEADS) for b in BLOCKS),
    ]


def _beside(grid: list) -> list[Problem]:
    """Few columns, gradients, and the kernels of other GPUs."""
    found = [
        Problem("decode", "dds", n, block, density, "fp16", rows, "nt")
        for n, densities in ((8192, (0.1, 0.5)), (4096, (0.25,)))
        for block in BLOCKS
        for density in densities
        for rows in DECODED
    ]
    found += [
        Problem("train", mode, 4096, block, density, "fp16", 4096)
        for mode in ("dsd", "dds")
        for block in BLOCKS
        for density in (0.25, 0.5)
    ]
    found += [
        Problem("portable", mode, 4096, block, density, "fp16", 4096)
        for mode in ("dsd", "dds")
        for block, density in grid
    ]
    found += [Problem("portable", "dsd", 4096, block, 0.25, "fp32", 4096) for block in BLOCKS]
    return found + [
        Problem("portable", "sdd", 4096, block, 0.25, "fp16", 64, heads=HEADS) for block in BLOCKS
    ]


# Tensors.


def layout_of(problem: Problem, device: str = "cuda") -> Layout:
    """Blocks along the diagonal, or drawn: the same ones always."""
    if problem.section == "diagonal":
        size = round(problem.density * problem.n)
        return blocksparse.block_diagonal(problem.n, problem.block, size, device=device)
    at = problem.n, problem.n, problem.block, problem.density
    return blocksparse.random(*at, heads=problem.heads, device=device)


def tensors(problem: Problem, layout: Layout, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a, b and a place for the result, or of a softmax x and that place. Sums have the size of
    their terms."""
    values = (layout.capacity, *layout.block)
    if problem.mode == "softmax":
        return _drawn(values, 1.0, problem, device), _empty(values, problem, device)
    n, columns = problem.n, problem.columns
    heads = () if problem.heads is None else (problem.heads,)
    wide, tall = (*heads, columns, n), (*heads, n, columns)
    shapes = {"dsd": (values, tall), "dds": (wide, values), "sdd": (tall, wide)}[problem.mode]
    out = {"dsd": tall, "dds": wide, "sdd": values}[problem.mode]
    terms = columns if problem.mode == "sdd" else n * problem.density
    made = []
    for shape, letter, sparse in zip(shapes, problem.transposes, problem.mode[1:], strict=True):
        stored = (*shape[:-2], shape[-1], shape[-2]) if (letter, sparse) == ("t", "d") else shape
        made.append(_drawn(stored, terms**-0.25, problem, device))
    return *made, _empty(out, problem, device)


def _drawn(shape: tuple, scale: float, problem: Problem, device: str) -> torch.Tensor:
    return (scale * torch.randn(shape, device=device)).to(problem.dtype)


def _empty(shape: tuple, problem: Problem, device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=problem.dtype, device=device)


# Values in float64, of a sample of rows of the result, or of its blocks.


def sampled(problem: Problem, layout: Layout, found: torch.Tensor) -> torch.Tensor:
    """What of a result :func:`exact` has values of."""
    if problem.mode == "softmax":
        return layout.to_dense(found)[..., sample_rows(problem.n, found.device), :]
    if problem.mode == "sdd":
        return found[sample_rows(layout.capacity, found.device)]
    return found[..., sample_rows(found.shape[-2], found.device), :]


def exact(problem: Problem, layout: Layout, *operands: torch.Tensor) -> torch.Tensor:
    """The result in float64 where :func:`sampled` takes it."""
    if problem.mode == "softmax":
        some = sample_rows(problem.n, operands[0].device)
        logits = layout.to_dense(operands[0])[..., some, :].double()
        stored = _elements(layout)[..., some, :]
        return torch.nan_to_num(logits.masked_fill(~stored, -torch.inf).softmax(-1))
    a, b = opened(problem, *dense(problem, layout, *operands))
    if problem.mode == "sdd":
        return _exact_blocks(layout, a, b)
    return a[..., sample_rows(a.shape[-2], a.device), :].double() @ b.double()


def dense(problem: Problem, layout: Layout, a: torch.Tensor, b: torch.Tensor) -> tuple:
    """The operands with the block-sparse one laid out, not yet transposed."""
    pairs = zip((a, b), problem.mode[1:], strict=True)
    return tuple(layout.to_dense(t) if letter == "s" else t for t, letter in pairs)


def opened(problem: Problem, a: torch.Tensor, b: torch.Tensor) -> tuple:
    """op(a) and op(b) of dense operands."""
    pairs = zip((a, b), problem.transposes, strict=True)
    return tuple(t.mT if letter == "t" else t for t, letter in pairs)


def _exact_blocks(layout: Layout, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    some = sample_rows(layout.capacity, a.device)
    rows, cols = (t[some].long() for t in layout.tensors[3:5])
    (grid_rows, grid_cols), (height, width) = layout.grid, layout.block
    heads = layout.heads or 1
    lines = a.reshape(heads * grid_rows, height, -1)[rows]
    at = torch.div(rows, grid_rows, rounding_mode="floor") * grid_cols + cols
    across = b.mT.reshape(heads * grid_cols, width, -1)[at]
    return lines.double() @ across.double().mT


def _elements(layout: Layout) -> torch.Tensor:
    """Of each element whether its block is stored."""
    rows, cols = layout.block
    return layout.mask().repeat_interleave(rows, -2).repeat_interleave(cols, -1)
