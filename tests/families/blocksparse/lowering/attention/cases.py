"""Attention of small tensors, by kernels that threads of the host run and by its formula in
float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernlib.families.blocksparse.kernels.attention.hopper import Hopper
from kernlib.families.blocksparse.kernels.attention.portable import Portable
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering.attention.problem import (
    Attention,
    Operand,
    Score,
    View,
)
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.steps import Lowered
from tests.families.blocksparse.emulated import DTYPES, blocks_of, launch
from tests.families.blocksparse.lowering.attention.dropout import kept

GATES = {"float16": 2e-3, "bfloat16": 1.6e-2}
ARCH, PROCESSORS = "sm_80", 108
PORTABLE, HOPPER = Portable(), Hopper()
GUARD = 3.25  # what elements hold that nobody may write


class Case(NamedTuple):
    """Sizes and what of a call is in the code. ``layout`` is of "one", "head" or "batch": for whom
    there is a mask. ``score`` and ``mask`` are of float64 tensors that broadcast."""

    numbers: str = "float16"
    block: tuple[int, int] = (16, 16)
    queries: int = 80
    keys: int = 96
    features: int = 32
    values: int = 32
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    density: float = 0.4
    layout: str = "one"
    causal: bool = False
    window: tuple[int, int] | None = None
    lengths: bool = False
    dropout: float = 0.0
    scale: float | None = None
    text: str = ""
    score: Callable | None = None
    mask: Callable | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.numbers]


CASES = {
    "16": Case(density=0.3, layout="head"),
    "ragged": Case(queries=75, keys=141, layout="batch", batch=2, heads=2),
    "32": Case("bfloat16", (32, 32), 130, 100, 64, 64),
    "64": Case(block=(64, 64), queries=140, keys=200, features=24, values=40, density=0.5),
    "128": Case(block=(128, 128), queries=150, keys=300, features=16, values=16, density=0.7),
    "wide blocks": Case(block=(16, 128), queries=64, keys=300, density=0.5),
    "tall blocks": Case("bfloat16", (128, 32), 200, 128, 48, 32),
    "causal": Case(block=(32, 16), queries=100, keys=100, causal=True, density=0.8),
    "causal, fewer columns": Case(queries=120, keys=50, causal=True, density=0.9),
    "window": Case(block=(16, 32), queries=130, keys=130, window=(20, 9), density=0.9),
    "causal window": Case(queries=130, keys=130, window=(33, 50), causal=True, density=1.0),
    "window aside": Case(queries=130, keys=150, window=(-7, 40), density=1.0, layout="head"),
    "lengths": Case(queries=90, keys=110, batch=3, lengths=True, density=0.8, layout="batch"),
    "all at once": Case(
        "bfloat16", (32, 32), 80, 100, 24, 40, 2, 4, 2, 0.7, "head", True, (40, 60), True, 0.2
    ),
    "72 features": Case("bfloat16", (32, 32), 70, 90, 72, 64, causal=True),
    "groups": Case(heads=6, kv_heads=2, layout="head"),
    "one head for all": Case(heads=3, kv_heads=1, queries=40),
    "dropout": Case(density=0.8, dropout=0.3, layout="head"),
    "128 features": Case(
        queries=70, keys=130, features=128, values=128, density=0.4, heads=1, kv_heads=1
    ),
    "256 features": Case(queries=70, keys=70, features=256, values=256, heads=1, kv_heads=1),
    "parts of two widths": Case(queries=40, keys=70, features=208, values=136, heads=1, kv_heads=1),
    "more values": Case(queries=70, keys=70, features=16, values=136, heads=1, kv_heads=1),
    "one row": Case(queries=1, keys=200, batch=3, density=0.7, layout="batch"),
    "negative scale": Case(scale=-0.7),
    "nothing stored": Case(density=0.0),
    "everything": Case(density=1.0, queries=64, keys=128),
}


class Made:
    """The tensors of a case, and its problem."""

    def __init__(self, case: Case, captured: tuple[torch.Tensor, ...] = ()):
        self.case, self.captured = case, captured
        b, h, g = case.batch, case.heads, case.kv_heads
        heads = {"one": None, "head": h, "batch": b * h}[case.layout]
        grid = ceil_div(case.queries, case.block[0]), ceil_div(case.keys, case.block[1])
        mask = torch.rand(*(() if heads is None else (heads,)), *grid) < case.density
        if case.density < 1 and grid[0] > 2:
            mask[..., grid[0] // 2, :] = False  # rows without blocks
        self.layout = Layout(mask, case.block)
        shape = {"q": (h, case.queries, case.features), "k": (g, case.keys, case.features)}
        shape |= {"v": (g, case.keys, case.values), "grad": (h, case.queries, case.values)}
        for name, size in shape.items():
            setattr(self, name, apart(torch.randn(b, *size).to(case.dtype)))
        self.out = guarded(b, h, case.queries, case.values, case.dtype)
        self.lse = torch.full((b, h, case.queries), GUARD)
        self.rest = torch.zeros_like(self.lse)
        self.q_lengths = self._lengths(case.queries)
        self.kv_lengths = self._lengths(case.keys)
        self.scale = 1 / math.sqrt(case.features) if case.scale is None else case.scale
        self.seed = 0x1234567 + case.keys

    def _lengths(self, most: int) -> torch.Tensor:
        if not self.case.lengths:
            return torch.full((self.case.batch,), most, dtype=torch.int32)
        return torch.randint(most // 2, most + 1, (self.case.batch,), dtype=torch.int32)

    @property
    def score(self) -> Score:
        case = self.case
        return Score(
            case.text,
            tuple(str(t.dtype).removeprefix("torch.") for t in self.captured),
            case.score is not None,
            case.mask is not None,
            case.causal,
            case.window is not None,
            case.lengths,
            case.dropout > 0,
        )

    def problem(self) -> Attention:
        case = self.case
        layout_strides = {"one": (0, 0), "head": (0, 1), "batch": (case.heads, 1)}[case.layout]
        return Attention(
            case.numbers,
            blocks_of(self.layout),
            case.batch, case.heads, case.kv_heads, case.queries, case.keys,
            case.features, case.values,
            *layout_strides,
            *(operand_of(t) for t in (self.q, self.k, self.v, self.out)),
            self.score,
            tuple(map(view_of, self.captured)),
        )  # fmt: skip

    @property
    def scalars(self) -> tuple[float, ...]:
        left, right = self.case.window or (0, 0)
        return (self.scale, float(left), float(right), self.case.dropout, float(self.seed))

    def operands(self) -> dict[str, torch.Tensor]:
        captured = {f"captured{i}": t for i, t in enumerate(self.captured)}
        lengths = {"q_lengths": self.q_lengths, "kv_lengths": self.kv_lengths}
        own = {name: getattr(self, name) for name in ("q", "k", "v", "out", "lse", "rest", "grad")}
        return {**own, **lengths, **captured}

    def launch(self, emulator, lowered, **more) -> None:
        """By an Emulator, or by what launches on a device, which takes what follows."""
        run = emulator if callable(emulator) else partial(launch, emulator)
        run(lowered, self.layout, self.scalars, **{**self.operands(), **more})

    def run(self, emulator, rows: int | None = None) -> torch.Tensor:
        """The result of the portable kernel, by its tile of so many rows, or that of the fewest."""
        problem = self.problem()
        known = PORTABLE.choices(problem, ARCH)
        chosen = known[-1] if rows is None else {"rows": rows}
        assert PORTABLE.takes(problem, ARCH) and chosen in known
        self.out.fill_(7.0)
        self.launch(emulator, launches_of(PORTABLE, problem, chosen))
        assert is_intact(self.out)
        return self.out

    def check(self) -> None:
        wanted, lse = self.wanted()
        assert error(self.out, wanted) <= GATES[self.case.numbers]
        assert error(self.lse, lse) <= 1e-5

    def sees(self) -> torch.Tensor:
        """(batch, heads, queries, keys): what is stored and seen by position."""
        case = self.case
        mask = self.layout.mask().bool().repeat_interleave(case.block[0], -2)
        mask = mask.repeat_interleave(case.block[1], -1)[..., : case.queries, : case.keys]
        if case.layout == "batch":
            mask = mask.unflatten(0, (case.batch, case.heads))
        mask = mask.expand(case.batch, case.heads, case.queries, case.keys).clone()
        row, col = self.places()[:2]
        mask &= row < self.q_lengths.view(-1, 1, 1, 1)
        mask &= col < self.kv_lengths.view(-1, 1, 1, 1)
        if case.causal:
            mask &= col <= row
        if case.window:
            mask &= (row - case.window[0] <= col) & (col <= row + case.window[1])
        return mask

    def places(self) -> tuple[torch.Tensor, ...]:
        """Numbers of rows, columns, heads and batches, which broadcast."""
        case = self.case
        row = torch.arange(case.queries).view(1, 1, -1, 1)
        col = torch.arange(case.keys).view(1, 1, 1, -1)
        return (
            row,
            col,
            torch.arange(case.heads).view(1, -1, 1, 1),
            torch.arange(case.batch).view(-1, 1, 1, 1),
        )

    def kept(self) -> torch.Tensor | float:
        """What a dropout multiplies weights by."""
        case = self.case
        if not case.dropout:
            return 1.0
        found = kept(self.seed, case.dropout, case.batch, case.heads, case.queries, case.keys)
        return found.to(self.q.device)

    def dense(self, q, k, v, captured=()) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and log-sum-exp in float64; what is left out counts nowhere."""
        case, sees = self.case, self.sees()
        group = case.heads // case.kv_heads
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        logits = self.scale * q @ k.mT
        if case.score is not None:
            logits = case.score(logits, *self.places(), *captured)
        left = sees & case.mask(*self.places(), *captured) if case.mask is not None else sees
        logits = torch.where(left, logits, -math.inf)
        is_empty = ~left.any(-1, keepdim=True)
        lse = torch.where(is_empty, 0.0, logits).logsumexp(-1, keepdim=True)
        lse = torch.where(lse == math.inf, math.nan, lse)  # as the weights are
        weights = torch.where(left, torch.where(is_empty, 0.0, logits).softmax(-1), 0.0)
        out = seen_product(weights * self.kept(), v, sees)
        return torch.where(is_empty, 0.0, out), torch.where(is_empty, -math.inf, lse)[..., 0]

    def doubles(self) -> list[torch.Tensor]:
        return [t.double().requires_grad_() for t in (self.q, self.k, self.v)]

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return self.dense(self.q.double(), self.k.double(), self.v.double(), self.captured)


def launches_of(
    kernel: Kernel, problem, choice=None, arch: str = ARCH, multiprocessors: int = PROCESSORS
) -> Lowered:
    """The launches of a problem by a kernel, with its default choice if there is none."""
    gpu, attention = Gpu(arch, multiprocessors), getattr(problem, "attention", problem)
    return kernel.launch(attention.score, problem, gpu, choice or kernel.default(problem, gpu))


def seen_product(weights, v, sees):
    """weights @ v, to which rows of v that are not seen add nothing, NaN or not."""
    if v.isfinite().all():
        return weights @ v
    return torch.where(sees[..., None], weights[..., None] * v[..., None, :, :], 0.0).sum(-2)


def apart(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, of which heads lie side by side, with NaN between their features."""
    b, h, rows, width = t.shape
    made = torch.full((b, rows, h, width + 8), math.nan, dtype=t.dtype)
    made = made.transpose(1, 2)[..., :width]
    made.copy_(t)
    return made


def guarded(b: int, h: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A result not yet written, amid what nobody may write."""
    return torch.full((b, h, rows + 3, width + 16), GUARD, dtype=dtype)[..., 1:-2, 8:-8]


def is_intact(out: torch.Tensor) -> bool:
    """Whether nothing was written outside of a result that :func:`guarded` made."""
    whole = out._base.clone()
    whole.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(GUARD)
    return bool((whole == GUARD).all())


def operand_of(t: torch.Tensor) -> Operand:
    return Operand(*t.stride()[:3], t.data_ptr() % 16 or 16)


def view_of(t: torch.Tensor) -> View:
    return View(*(s if n > 1 else 0 for s, n in zip(t.stride(), t.shape, strict=True)))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in norm; NaN and infinities must be where they are wanted."""
    assert found.isnan().equal(wanted.isnan())
    odd = ~wanted.isfinite()
    assert torch.equal(found.double()[odd].nan_to_num(), wanted[odd].nan_to_num())
    found, wanted = (torch.where(odd, 0.0, t.double()) for t in (found, wanted))
    size = wanted.norm().item()
    return (found - wanted).norm().item() / (size or 1.0)
