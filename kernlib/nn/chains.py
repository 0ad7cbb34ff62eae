"""Which chains of Kronecker-sparse factors pay in a model, by parameters, operations and time.

Estimates are of an H200: microseconds of the GPU, without the host's. A product moves its operands
once and multiplies; its time is ``LAUNCH + ((a bytes)^p + (b operations)^p)^(1/p)``, each in the
time that a copy and tensor cores take for it. The constants were fitted to the rows of
``benchmarks/results/h200/kronecker_sparse.json``, of 25088 rows, whose times they give to within a
root mean square of 3 % (dense, float32) to 12 % (batch first, d of 8 to 31). Of fewer rows products
take up to 1.3 times as long: (1, 256, 64, 64) behind (64, 64, 64, 1) by 8192 rows in bfloat16.

Chains of two factors that are one kernel move x and y alone. With a d of 16 and more they wait for
the cache: x, and both weights for every 64 rows. These estimates are within a third of the rows
``ks chain`` and ``ks layer`` of ``benchmarks/results/h200/programs.json``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from kernlib.descriptors.base import as_int, as_number, shown
from kernlib.families.kronecker_sparse.chain.fused import is_fused
from kernlib.hints.calls import hinted
from kernlib.nn.kronecker_sparse_algorithms import Pattern
from kernlib.nn.linears import as_linear, check_model, checked_match, linears, matches
from kernlib.runtime.precision import kernel_precision

if TYPE_CHECKING:
    from rich.table import Table

Sizes = tuple[int, int]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # into which the features are cut
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)  # of the parts of a chain's matrix
MOST = 2**60 - 1  # rows
LEAST = 16  # sides of factors below this leave tensor cores idle

LAUNCH = 4.0
BANDWIDTH = 4.27e6  # bytes a microsecond
HALF, FP32, TF32 = "half", "fp32", "tf32"
ITEMSIZE = {HALF: 2, FP32: 4, TF32: 4}
# Operations a microsecond: of factors, fp32 by 3xTF32, and of cuBLAS, fp32 without tensor cores.
OPERATIONS = {HALF: 700e6, FP32: 138e6, TF32: 380e6}
DENSE_OPERATIONS = {HALF: 700e6, FP32: 50e6, TF32: 380e6}


class Rates(NamedTuple):
    """Times a copy takes, times tensor cores take, and the power by which both are added."""

    moved: float
    computed: float
    power: float


PLAIN = {  # batch last, or d = 1
    HALF: Rates(1.18, 1.05, 3), FP32: Rates(1.4, 1.4, 8), TF32: Rates(1.18, 1.15, 3),
}  # fmt: skip
NARROW = {  # batch first, d below 8
    HALF: Rates(1.2, 1.625, 3), FP32: Rates(1.0, 1.775, 1.5), TF32: Rates(1.28, 1.7, 3),
}  # fmt: skip
WIDE = {  # batch first, d of 8 and more
    HALF: Rates(1.0, 2.3, 1.5), FP32: Rates(1.6, 1.6, 1), TF32: Rates(1.0, 2.6, 1),
}  # fmt: skip
APART = {  # batch first, d of 32 and more; TF32 was not measured
    HALF: Rates(2.2, 1.7, 1), FP32: Rates(2.02, 1.475, 1), TF32: Rates(2.02, 2.6, 1),
}  # fmt: skip
DENSE = {
    HALF: Rates(1.24, 0.8, 2), FP32: Rates(2.2, 0.925, 1), TF32: Rates(1.76, 0.925, 3),
}  # fmt: skip

FUSED = Rates(1.2, 1.0, 1)  # two factors as one kernel, half types
CACHE = 4.2e6  # bytes a microsecond from and to L2


class Estimate(NamedTuple):
    """Microseconds that an H200 takes for a layer and for the dense one, without the host's."""

    layer_us: float
    dense_us: float

    @property
    def speedup(self) -> float:
        """How many times as long the dense layer takes."""
        return self.dense_us / self.layer_us

    def __str__(self) -> str:
        times = f"{self.layer_us:.1f} us, dense {self.dense_us:.1f} us"
        return f"{times}: {self.speedup:.2f} x as fast"


class Suggestion(NamedTuple):
    """A chain for layers of some sizes: numbers in its factors, operations for the rows it was
    asked for, and its estimate."""

    chain: tuple[Pattern, ...]
    parameters: int
    operations: int
    estimate: Estimate


class Suggestions(Mapping[Sizes, tuple[Suggestion, ...]]):
    """Chains by ``(in_features, out_features)``, those with most parameters first, for ``rows``
    rows in ``dtype``. None is estimated to be slower than the dense layer; sizes for which there is
    no such chain have an empty tuple. ``print(suggestions)`` and rich show a table."""

    def __init__(
        self, by_sizes: dict[Sizes, tuple[Suggestion, ...]], rows: int, dtype: torch.dtype
    ):
        self._by_sizes, self.rows, self.dtype = by_sizes, rows, dtype

    def __getitem__(self, sizes: Sizes) -> tuple[Suggestion, ...]:
        return self._by_sizes[sizes]

    def __iter__(self) -> Iterator[Sizes]:
        return iter(self._by_sizes)

    def __len__(self) -> int:
        return len(self._by_sizes)

    def patterns(self, speedup: float = 1.0) -> dict[Sizes, tuple[Pattern, ...]]:
        """For :func:`kernlib.nn.replace_linear`: of each sizes the chain of most parameters that
        is estimated to be ``speedup`` times as fast as the dense layer, if there is one. Raises
        TypeError for what is no number, and ValueError for one below 0 or NaN."""
        speedup, chains = as_number("speedup", speedup), {}
        if not speedup >= 0:
            raise ValueError(f"speedup must be 0 or more, got {speedup}")
        for sizes, suggestions in self._by_sizes.items():
            fast = [s.chain for s in suggestions if s.estimate.speedup >= speedup]
            chains |= {sizes: fast[0]} if fast else {}
        return chains

    def __rich__(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        kind = str(self.dtype).removeprefix("torch.")
        title = f"Chains for {self.rows} rows in {kind}, estimated for an H200"
        caption = "share: of the dense layer's parameters, and of its operations"
        edges = {"collapse_padding": True, "pad_edge": False}
        table = Table(title=title, box=SIMPLE_HEAD, caption=caption, **edges)
        table.add_column("layer", no_wrap=True)
        table.add_column("factors, first one first", min_width=17)
        for name in ("parameters", "share", "us", "dense", "speed-up"):
            table.add_column(name, justify="right", no_wrap=True)
        for (cols, out), suggestions in self._by_sizes.items():
            dense, layer = cols * out, f"{cols} to {out}"
            if not suggestions:
                table.add_row(layer, "none is faster", *[""] * 5)
            for s in suggestions:
                words = [f"{s.parameters:,}", f"{100 * s.parameters / dense:.1f} %"]
                words += [f"{time:.1f}" for time in s.estimate]
                chain = " ".join(map(_short, s.chain))
                table.add_row(layer, chain, *words, f"{s.estimate.speedup:.2f}")
                layer = ""
        return table

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get().rstrip()


def _short(pattern: Pattern) -> str:
    return "(" + ",".join(map(str, pattern)) + ")"


@hinted
def suggest_chains(
    model: nn.Module,
    rows: int,
    dtype: torch.dtype | None = None,
    *,
    match: str | re.Pattern[str] | Callable[[str, nn.Linear], bool] | None = None,
    count: int = 5,
) -> Suggestions:
    """Chains of two factors for the ``nn.Linear`` layers of a model, which
    :func:`kernlib.nn.replace_linear` may take: ``replace_linear(model, suggestions.patterns())``.

    Each is ``(g, m, in/g, 1), (1, out/d, g m/d, d)``, of which the first mixes g groups of
    features, and the second brings each group to each output: every output reads every input, by
    blocks of rank m/d. Listed are, of those faster than the dense layer by their estimate, the ones
    of which no other has as many parameters and takes less time, ``count`` of them at most.

    - ``model``: an ``nn.Module``.
    - ``rows``: of the layers' inputs, such as batch times length.
    - ``dtype``: float16, bfloat16 or float32, by default that of the first layer. float32 counts as
      torch's setting permits, as fp32 or TF32.
    - ``match``: which layers are looked at, as of ``replace_linear``.
    - ``count``: how many chains of a size are listed at most.

    Raises ValueError for ``rows`` or ``count`` below 1, TypeError for another dtype and for what is
    no model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(768, 3072))
        >>> found = kl.nn.suggest_chains(model, 25088, torch.float16)
        >>> kl.nn.replace_linear(model, found.patterns(speedup=1.5))["0"].num_mat
        2
    """
    check_model(model, "put it in an nn.Sequential")
    rows, count = as_count("rows", rows), as_count("count", count)
    match = checked_match(match)
    layers = [layer for _, _, name, layer in linears(model) if matches(match, name, layer)]
    sizes: dict[Sizes, torch.dtype] = {}  # not the layers, whose weights may be computed
    for layer in map(as_linear, dict.fromkeys(layers)):
        sizes.setdefault((layer.in_features, layer.out_features), layer.weight.dtype)
    if dtype is None:
        dtype = next(iter(sizes.values()), torch.float32)
    kind = kind_of(dtype, None)
    return Suggestions({pair: _best(*pair, rows, kind, count) for pair in sizes}, rows, dtype)


def as_count(name: str, value: object) -> int:
    """An int of 1 to MOST. Raises TypeError and ValueError for others."""
    number = as_int(name, value)
    if not 1 <= number <= MOST:
        raise ValueError(f"{name} must be 1 or more, below 2**60, got {shown(number)}")
    return number


def kind_of(dtype: torch.dtype, precision: str | None) -> str:
    """The kind of products that estimates know. Raises TypeError for other dtypes."""
    if dtype not in DTYPES:
        raise TypeError(
            f"dtype must be float16, bfloat16 or float32, which were measured, got {shown(dtype)}"
        )
    return kernel_precision(precision, dtype) if dtype == torch.float32 else HALF


def estimate_of(
    patterns: Sequence[Pattern], sizes: Sizes, rows: int, kind: str, batch_last: bool = False
) -> Estimate:
    """The estimate for a chain and the dense layer of its sizes."""
    layer = _chain_time(patterns, rows, kind, batch_last)
    return Estimate(layer, _dense_time(*sizes, rows, kind))


def _best(cols: int, out: int, rows: int, kind: str, count: int) -> tuple[Suggestion, ...]:
    """The fastest of each number of parameters, those with most first."""
    suggestions = []
    for chain in _chains(cols, out):
        parameters = sum(math.prod(pattern) for pattern in chain)
        estimate = estimate_of(chain, (cols, out), rows, kind)
        if parameters < cols * out and estimate.speedup > 1:
            done = _operations(chain, rows)
            suggestions.append(Suggestion(chain, parameters, done, estimate))
    suggestions.sort(key=lambda one: (-one.parameters, one.estimate.layer_us, one.chain))
    front: list[Suggestion] = []
    for suggestion in suggestions:
        if not front or suggestion.estimate.layer_us < front[-1].estimate.layer_us:
            front.append(suggestion)
    if len(front) <= count:
        return tuple(front)
    steps = [round(index * (len(front) - 1) / max(1, count - 1)) for index in range(count)]
    return tuple(front[step] for step in dict.fromkeys(steps))


def _chains(cols: int, out: int) -> Iterator[tuple[Pattern, Pattern]]:
    """The chains whose sides leave no tensor core idle."""
    for groups in GROUPS:
        if cols % groups or cols // groups < LEAST:
            continue
        for apart in GROUPS:
            for rank in RANKS:
                between = apart * rank  # features of a group
                wide = groups * rank, out // apart
                if out % apart or between < LEAST or min(wide) < LEAST:
                    continue
                first = (groups, between, cols // groups, 1)
                yield first, (1, out // apart, groups * rank, apart)


# Times.


def _operations(patterns: Sequence[Pattern], rows: int) -> int:
    """The operations of a chain: a multiplication and an addition for each number of a factor and
    row."""
    return 2 * rows * sum(math.prod(pattern) for pattern in patterns)


def _chain_time(patterns: Sequence[Pattern], rows: int, kind: str, batch_last: bool) -> float:
    """Microseconds of the factors as one kernel or one after the other, with bias and activation in
    the last one."""
    if kind == HALF and not batch_last and is_fused(tuple(patterns), rows):
        return _fused_time(*patterns, rows)
    return sum(_factor_time(pattern, rows, kind, batch_last) for pattern in patterns)


def _fused_time(first: Pattern, last: Pattern, rows: int) -> float:
    (a, _, c, _), (groups, columns, _, d) = first, last
    inner, outer = rows * a * c, rows * groups * columns * d
    if d < 16:
        done = _operations((first, last), rows) / OPERATIONS[HALF]
        return _estimated((inner + outer) * ITEMSIZE[HALF], done, FUSED)
    weights = math.prod(first) + math.prod(last)
    cached = inner * d // 16 + -(-rows // 64) * weights + outer
    return LAUNCH + cached * ITEMSIZE[HALF] / CACHE


def _factor_time(pattern: Pattern, rows: int, kind: str, batch_last: bool) -> float:
    a, b, c, d = pattern
    numbers = rows * a * d * (b + c) + a * b * c * d
    done = _operations([pattern], rows) / OPERATIONS[kind]
    return _estimated(numbers * ITEMSIZE[kind], done, _rates(d, batch_last)[kind])


def _rates(d: int, batch_last: bool) -> dict[str, Rates]:
    if batch_last or d == 1:
        return PLAIN
    return NARROW if d < 8 else WIDE if d < 32 else APART


def _dense_time(in_features: int, out_features: int, rows: int, kind: str) -> float:
    """Microseconds of cuBLAS."""
    weight = in_features * out_features
    numbers = rows * (in_features + out_features) + weight
    done = 2 * rows * weight / DENSE_OPERATIONS[kind]
    return _estimated(numbers * ITEMSIZE[kind], done, DENSE[kind])


def _estimated(bytes_moved: int, done: float, rates: Rates) -> float:
    moved, computed = rates.moved * bytes_moved / BANDWIDTH, rates.computed * done
    return LAUNCH + (moved**rates.power + computed**rates.power) ** (1 / rates.power)
