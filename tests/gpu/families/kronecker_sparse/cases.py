"""Shared by the gpu tests of the Kronecker-sparse family: exact results, errors, forced kernels.

Nothing here asks for a GPU but DEVICE: the references can be tried on CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar
from unittest import mock

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.ahead import build_all
from kernlib.families.kronecker_sparse import operation, plans, reference
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.problem import Problem
from kernlib.jit import tuning
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered
from kernlib.runtime import devices
from kernlib.runtime.plan import forget_plans
from tests.gpu.watched import launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = float("nan")
Result = TypeVar("Result")

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
TOLERANCE = {"fp32": 1e-6, "tf32": 2e-3, "fp16": 1e-3, "bf16": 8e-3}
NUMBERS = tuple(DTYPES)
LAYOUTS = (False, True)  # batch_last

# Odd sizes, b != c, no common divisor, and each way in which a kernel takes the lanes: d of 1, of
# one to eight 16-byte words, of several spans, and of no whole word.
PATTERNS = (
    (1, 1, 1, 1), (2, 3, 5, 4), (3, 7, 8, 2), (1, 10, 14, 3), (2, 20, 8, 16), (1, 100, 48, 4),
    (2, 33, 65, 1), (3, 48, 40, 8), (1, 24, 24, 64), (2, 16, 16, 24), (5, 12, 20, 12),
    (1, 514, 20, 2), (1, 300, 520, 1), (1, 768, 192, 2), (2, 72, 100, 2),
)  # fmt: skip
# One for each kernel of a product, batch first: whole spans of lanes, none, and what fits no word.
LANES, BLOCKS, ODD = FEW = ((2, 40, 24, 16), (3, 64, 48, 1), (2, 3, 5, 3))
CHAIN = ((2, 12, 24, 1), (1, 24, 12, 2))  # of a layer that takes 48 features to 48

both_layouts = pytest.mark.parametrize("batch_last", LAYOUTS, ids=("first", "last"))
all_numbers = pytest.mark.parametrize("numbers", NUMBERS)
few_patterns = pytest.mark.parametrize("pattern", FEW, ids=str)


def product(pattern, numbers="fp32", batch_last=False, epilogue=()) -> kl.KroneckerSparse:
    """A factor whose float32 products are as accurate as ``numbers`` says."""
    precision = numbers if DTYPES[numbers] == torch.float32 else None
    return kl.KroneckerSparse(
        *pattern, batch_last=batch_last, epilogue=epilogue, precision=precision
    )


def random(*shape: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE, dtype=torch.float64) * scale).to(dtype)


def shape_of(features: int, batch: tuple[int, ...], batch_last: bool) -> tuple[int, ...]:
    return (features, *batch) if batch_last else (*batch, features)


def operands(pattern, batch, numbers="fp32", batch_last=False) -> tuple[torch.Tensor, ...]:
    """x of a batch (an int or sizes) and a weight."""
    a, _, c, d = pattern
    sizes = (batch,) if isinstance(batch, int) else batch
    shape, dtype = shape_of(a * c * d, sizes, batch_last), DTYPES[numbers]
    return random(*shape, dtype=dtype), random(*pattern, dtype=dtype)


def meta(pattern, batch: int, numbers="fp32", batch_last=False) -> tuple[torch.Tensor, ...]:
    """Stand-ins for :func:`operands`."""
    a, _, c, d = pattern
    shapes, dtype = (shape_of(a * c * d, (batch,), batch_last), pattern), DTYPES[numbers]
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)


def index() -> int:
    """Of the device of all these tensors."""
    return torch.empty(0, device=DEVICE).get_device()


# Exact results and errors.


def matrix(weight: torch.Tensor) -> torch.Tensor:
    """K of a weight in float64."""
    return reference.dense(tuple(weight.shape), weight.detach().double())


def times(matrix: torch.Tensor, x: torch.Tensor, batch_last: bool) -> torch.Tensor:
    return torch.tensordot(matrix, x, ([1], [0])) if batch_last else x @ matrix.T


def exact(x: torch.Tensor, weight: torch.Tensor, batch_last: bool = False) -> torch.Tensor:
    """The product in float64, of the operands as they are."""
    return times(matrix(weight), x.detach().double(), batch_last)


def lay(vector: torch.Tensor, batch_last: bool) -> torch.Tensor:
    """A value for each output feature, in float64, as it broadcasts with results (n, features)."""
    return vector.detach().double()[:, None] if batch_last else vector.detach().double()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """``|found - wanted| / |wanted|`` in the Frobenius norm; NaN never passes."""
    difference, scale = (found.detach().double() - wanted).norm(), wanted.norm()
    return (difference / scale if scale > 0 else difference).item()


def row_norms(wanted, x, weight, batch_last: bool) -> torch.Tensor:
    """What errors of the vectors of a batch are relative to: the norm of each or, where its terms
    cancel, the one that it has if they do not."""
    squares = times(matrix(weight).square(), x.detach().double().square(), batch_last)
    axis = 0 if batch_last else -1
    return torch.maximum(wanted.norm(dim=axis), squares.sum(axis).sqrt())


def row_error(found, wanted, norms: torch.Tensor, batch_last: bool) -> float:
    """The largest error of a vector of the batch; of one too small for normal numbers, relative to
    the smallest of those."""
    difference = (found.detach().double() - wanted).norm(dim=0 if batch_last else -1)
    return (difference / norms.clamp_min(torch.finfo(found.dtype).tiny)).max().item()


# Kernels.


def problem_of(descriptor, x, weight, out=None, **parameters) -> Problem:
    """What lowering sees of a call."""
    call = operation.check_call(descriptor, (x, weight), out, parameters)
    return plans.problem_of(descriptor, call, x, weight, out)[0]


def lowered(epilogue: tuple, problem: Problem, choice) -> Lowered:
    arch, gpu = devices.arch_of(index()), devices.model(index())
    return lowering.lower(epilogue, problem, arch, gpu.multiprocessors, choice)


def candidates(problem: Problem) -> list[dict]:
    return lowering.candidates(problem, devices.arch_of(index()))


def first_of_each_kind(problem: Problem) -> list[dict]:
    """The candidates that their kinds of kernel prefer."""
    found = {choice["kind"]: choice for choice in reversed(candidates(problem))}
    return list(reversed(found.values()))


def specs_of(epilogue: tuple, problem: Problem, every: bool = False) -> list[KernelSpec]:
    """The kernels that :func:`each` runs."""
    known = candidates(problem) if every else first_of_each_kind(problem)
    steps = [step for choice in (None, *known) for step in lowered(epilogue, problem, choice).steps]
    return [step.spec for step in steps]


def specs_of_step(descriptor: kl.KroneckerSparse, batch: int, numbers: str) -> list[KernelSpec]:
    """The kernels of a product, with all epilogues fused and as it is recorded, and of its
    gradients."""
    x, weight = meta(descriptor.pattern, batch, numbers, descriptor.batch_last)
    vectors = {name: x.new_empty(descriptor.out_features) for name in descriptor.vectors}
    values = {name: vectors.get(name, 1.0) for name in descriptor.parameters}
    found, arch = [], devices.arch_of(index())
    for recorded in (False, True):
        for tensor in (x, weight, *vectors.values()):
            tensor.requires_grad_(recorded)
        found += ahead.specs(descriptor, arch, (x, weight), values, index())
    return found


def build(specs: list[KernelSpec]) -> None:
    """Compile kernels on all processors at once: one after the other those of this family's tests
    take two minutes."""
    arch = devices.arch_of(index())
    build_all([(spec, arch) for spec in dict.fromkeys(specs)], None, False)


class Seen(NamedTuple):
    """What became of calls: descriptions of the kernels launched, (epilogue, problem) of those that
    were planned, and the problems of these that torch computes."""

    launched: list[str]
    planned: list[tuple[tuple, Problem]]
    by_torch: list[Problem]


@contextmanager
def choosing(choice: dict | None) -> Iterator[Seen]:
    """Calls take a choice as if tuning had kept it, None for the rule."""
    planned, by_torch, plain = [], [], lowering.lower

    def lower(epilogue, problem, *others) -> Lowered | None:
        planned.append((epilogue, problem))
        made = plain(epilogue, problem, *others)
        by_torch.extend([problem] * (made is None))
        return made

    forget_plans()
    try:
        with (
            mock.patch.object(tuning, "choice", lambda *_: choice),
            mock.patch.object(lowering, "lower", lower),
            launches() as launched,
        ):
            yield Seen(launched, planned, by_torch)
    finally:
        forget_plans()


@contextmanager
def only(*names: str) -> Iterator[None]:
    """Calls know these kinds of kernel alone, forward and backward; all without names."""
    forget_plans()
    some = tuple(kernel for kernel in lowering.kernels() if not names or kernel.name in names)
    try:
        with mock.patch.object(lowering, "kernels", lambda problem=None: some):
            yield
    finally:
        forget_plans()


KERNELS = {"by rule": (), "portable": ("portable",)}  # arguments of only()


def each(call: Callable[[], Result], every: bool = False) -> Iterator[tuple[str, Result]]:
    """What a call gives by the rule, and by one candidate of each kind or by every one that is
    another kernel; with the names of the kernels."""
    with choosing(None) as seen:
        found = call()
    yield f"by rule: {seen.launched or 'torch'}", found
    is_seen = bool(seen.planned) == bool(seen.launched or seen.by_torch)
    assert is_seen, "kernels whose problems were not seen"
    if not seen.planned:
        return
    epilogue, problem = seen.planned[-1]
    by_rule = [step.spec for step in lowered(epilogue, problem, None).steps]
    ran = [] if problem in seen.by_torch else [by_rule]
    for choice in candidates(problem) if every else first_of_each_kind(problem):
        specs = [step.spec for step in lowered(epilogue, problem, choice).steps]
        if specs in ran:
            continue
        ran.append(specs)
        with choosing(choice) as seen:
            found = call()
        last = seen.launched[-len(specs) :]
        assert last == [spec.description for spec in specs], f"{choice} launched {seen.launched}"
        yield f"by {choice}: {seen.launched}", found


def check(
    descriptor, x, weight, numbers: str, *, wanted=None, tolerance=None, every=False, **parameters
) -> None:
    """Run a call with :func:`each`, into poisoned outputs, and compare with float64: as a whole
    and, for the product alone, by row."""
    last = descriptor.batch_last
    bound = TOLERANCE[numbers] if tolerance is None else tolerance
    norms = None
    if wanted is None:
        wanted = exact(x, weight, last)
        norms = row_norms(wanted, x, weight, last)

    def call() -> torch.Tensor:
        out = torch.full(wanted.shape, POISON, dtype=x.dtype, device=x.device)
        assert kl.run_kernel(descriptor, x, weight, out=out, **parameters) is out
        return out

    for name, found in each(call, every):
        case = f"{descriptor.describe()} {numbers} of {tuple(x.shape)} {name}"
        error = relative_error(found, wanted)
        assert error <= bound, f"{case}: error {error:.2e} > {bound:.0e}"
        if norms is not None:
            error = row_error(found, wanted, norms, last)
            assert error <= bound, f"{case}: error {error:.2e} of a row > {bound:.0e}"


# Memory.


def views(t: torch.Tensor, fill: float = math.nan) -> dict[str, torch.Tensor]:
    """The values of ``t`` (rows, columns) in other memory, of which the rest holds ``fill``."""
    n, k = t.shape

    def inside(rows: int, columns: int, place: tuple, turned: bool = False) -> torch.Tensor:
        whole = torch.full((rows, columns), fill, dtype=t.dtype, device=t.device)
        view = whole[place].mT if turned else whole[place]
        return view.copy_(t)

    some = slice(None)
    return {
        "itself": inside(n, k, (some, some)),
        "leading dimension": inside(n + 3, k + 8, (slice(n), slice(k))),
        "odd leading dimension": inside(n, k + 1, (some, slice(k))),
        "slice of rows": inside(n + 5, k, (slice(3, n + 3), some)),
        "slice of columns": inside(n, k + 16, (some, slice(8, k + 8))),
        "one element further": inside(n, k + 3, (some, slice(1, k + 1))),
        "every third row": inside(3 * n, k, (slice(None, None, 3), some)),
        "every third column": inside(n, 3 * k, (some, slice(None, None, 3))),
        "transposed": inside(k, n, (some, some), True),
        "transposed slice": inside(k + 2, n + 8, (slice(1, k + 1), slice(n)), True),
    }
