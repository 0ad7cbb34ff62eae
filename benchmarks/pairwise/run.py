"""Distance and kernel matrices: kernlib, its floor, torch, torch.compile and KeOps.

``python -m benchmarks.pairwise --json benchmarks/results/h200/pairwise.json``, and the same with
KERNLIB_PORTABLE=1 for the kernels of other GPUs

The cases of the gradient, of products that store no matrix, of neighbours and of systems are in
``gradient.py``, ``matmul.py``, ``nearest.py`` and ``system.py``. KeOps counts where `pykeops` is
installed, whose LD_LIBRARY_PATH and CUDA_PATH must lead to NVRTC, libcudart and their headers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import kernlib as kl
from benchmarks.common import harness
from benchmarks.common.harness import UNITS_PER_MS, Case, Row, Session, headers
from benchmarks.common.timing import Device, relative_error, sample_rows
from benchmarks.pairwise import (
    formulas,
    gradient,
    logsumexp,
    matmul,
    matmul_gradient,
    nearest,
    system,
)
from benchmarks.pairwise.problems import (
    DTYPES,
    TENSOR_RATES,
    exact_distances,
    float32_products,
    floor_ms,
    race,
    timed,
)
from kernlib.settings import current

SOURCE = "\n".join(f'#include "{name}"' for name in headers("pairwise"))
COMPILED_K = 64  # above it torch.compile of the plain expression takes minutes

# Of one pair-feature: (issue slots, special-function operations), as in pairwise/terms.cuh.
COSTS = {
    1.0: (2, 0),
    2.0: (2, 0),
    math.inf: (2, 0),
    3.0: (3, 0),
    0.5: (3, 1),
    1.5: (3, 1),
    1.3: (2, 2),
}
FP64_SLOTS = 2  # a float64 operation takes the slots of two

# Hard data: columns with means of HARD_MEAN times their spread, and one point of b in
# HARD_EVERY beside one of a, at these multiples of the spread.
HARD_MEAN, HARD_EVERY, HARD_NEAR = 100.0, 100, (1e-4, 1e-1)

P1 = "cdist p=1 30000x30000x1024 fp32"
LAPLACE_OVER_P1 = 1.03


@dataclass(frozen=True)
class Problem:
    """One case: what is computed, for which shape, and the target it is held to."""

    label: str
    p: float
    m: int
    n: int
    k: int
    dtype: str = "fp32"
    epilogue: str = ""  # "laplace" or "gaussian"
    symmetric: bool = False
    dot: bool = False  # products in place of differences
    direct: bool = False  # differences even for p = 2
    hard: bool = False  # data whose distances cancel
    must: float | None = None
    must_error: float | None = None
    unit: str = "ms"

    @property
    def name(self) -> str:
        return f"{self.label} {self.m}x{self.n}x{self.k} {self.dtype}"

    @property
    def bandwidth(self) -> float:
        """One that puts the kernel's values near exp(-1) for points of a normal distribution."""
        return math.sqrt(self.k) if self.epilogue == "gaussian" else float(self.k)

    @property
    def expanded(self) -> bool:
        """Whether tensor cores can do it: squares by products, or products asked for."""
        return self.p == 2 and not self.direct and self.dtype in TENSOR_RATES

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them."""
        pairs = self.m * (self.m + 1) / 2 if self.symmetric else self.m * self.n
        written = self.m * self.n * DTYPES[self.dtype].itemsize
        if self.expanded:
            operations = 2 * pairs * self.k
            return floor_ms(device, moved=written, operations=operations, kind=self.dtype)
        slots, special = COSTS[self.p]
        if self.dtype == "fp64":
            slots *= FP64_SLOTS
        return floor_ms(device, slots * pairs * self.k, special * pairs * self.k, written)


def cdist(
    p: float, k: int = 1024, must=None, must_error=None, size=30000, form="", **fields
) -> Problem:
    fields = {"must": must, "must_error": must_error, **fields}
    return Problem(" ".join(f"cdist p={p:g} {form}".split()), float(p), size, size, k, **fields)


PROBLEMS = (
    cdist(1, must=70.0, must_error=2e-7),
    cdist(2, must=20.0, must_error=1e-6),
    cdist(2, dtype="tf32"),
    cdist(2, form="direct", direct=True, must=70.0, must_error=2e-7),
    cdist(2, form="hard", hard=True, must_error=1e-5),
    Problem("dot_product", 2.0, 30000, 30000, 1024, dot=True),
    cdist(1.3, must=460.0, must_error=1e-6),
    Problem("laplace_l1", 1.0, 30000, 30000, 1024, epilogue="laplace"),
    cdist(1, 32),
    Problem("gaussian", 2.0, 30000, 30000, 32, epilogue="gaussian"),
    Problem("gaussian", 2.0, 30000, 30000, 784, epilogue="gaussian"),
    cdist(3),
    cdist(0.5),
    cdist(1.5),
    cdist(math.inf),
    Problem("laplace_l1 symmetric", 1.0, 30000, 30000, 1024, epilogue="laplace", symmetric=True),
    cdist(1, dtype="fp16"),
    cdist(1, 256, size=10000, dtype="fp64"),
    cdist(1, 64, size=1000, unit="us"),
    cdist(1, 1023),
)


# Ours.


def kernel(problem: Problem) -> Callable:
    """``f(a, b, out)`` by kernlib."""
    descriptor, arguments = described(problem)
    if problem.symmetric:
        return lambda a, b, out: kl.run_kernel(descriptor, a, out=out, **arguments)
    return lambda a, b, out: kl.run_kernel(descriptor, a, b, out=out, **arguments)


def described(problem: Problem) -> tuple[object, dict]:
    """Descriptor and hyperparameters of a case."""
    precision = "tf32" if problem.dtype == "tf32" else None
    if problem.epilogue == "laplace":
        return kl.laplace_l1(symmetric=problem.symmetric), {"bandwidth": problem.bandwidth}
    if problem.epilogue == "gaussian":
        return kl.gaussian(), {"bandwidth": problem.bandwidth}
    if problem.dot:
        return kl.dot_product(precision=precision), {}
    if problem.p == 1:
        return kl.l1_distance(), {}
    if problem.p == 2:
        return kl.l2_distance(precision=precision, direct=problem.direct), {}
    return kl.p_distance(), {"p": problem.p}


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a, b and out."""
    generator = torch.Generator(device).manual_seed(0)
    kind = {"device": device, "dtype": DTYPES[problem.dtype]}
    a = torch.randn(problem.m, problem.k, generator=generator, **kind)
    b = a if problem.symmetric else torch.randn(problem.n, problem.k, generator=generator, **kind)
    if problem.hard:
        harden(a, b, generator)
    return a, b, torch.empty(problem.m, problem.n, **kind)


def harden(a: torch.Tensor, b: torch.Tensor, generator: torch.Generator) -> None:
    """Shift the columns of both, and put points of b beside those of a that :func:`sampled` takes
    its rows from. None coincide, so that each distance has a relative error."""
    means = torch.randn(a.shape[1], generator=generator, device=a.device).sign_() * HARD_MEAN
    near = a[doubled(a, b)]
    noise = torch.randn(near.shape, generator=generator, device=a.device)
    low, high = (math.log10(size) for size in HARD_NEAR)
    sizes = torch.logspace(low, high, len(near), device=a.device)
    b[-len(near) :] = near + sizes[:, None] * noise
    a += means
    b += means


def doubled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The points of a that have a near one in b: one in HARD_EVERY, spread evenly."""
    count = max(1, min(len(a), len(b)) // HARD_EVERY)
    return torch.arange(count, device=a.device) * (len(a) - 1) // max(count - 1, 1)


def sampled(problem: Problem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rows whose errors are taken: of hard data those with a near pair."""
    if not problem.hard:
        return sample_rows(problem.m, a.device)
    near = doubled(a, b)
    return near[sample_rows(len(near), a.device)]


# The same in plain torch.


def finish(problem: Problem, distance: torch.Tensor) -> torch.Tensor:
    """The epilogue of a distance."""
    if problem.epilogue == "laplace":
        return torch.exp(-distance / problem.bandwidth)
    if problem.epilogue == "gaussian":
        return torch.exp(-distance.square() / (2 * problem.bandwidth**2))
    return distance


def plain(problem: Problem) -> Callable:
    """``f(a, b, out)`` with torch.cdist in its default mode, or torch.matmul."""
    if problem.dot:
        return lambda a, b, out: torch.matmul(a, b.mT, out=out)
    return lambda a, b, out: finish(problem, torch.cdist(a, b, p=problem.p))


def plain_differences(problem: Problem) -> Callable:
    """The same with torch.cdist in the mode that takes differences for p = 2 too."""
    mode = "donot_use_mm_for_euclid_dist"
    return lambda a, b, out: finish(problem, torch.cdist(a, b, p=problem.p, compute_mode=mode))


def compiled(problem: Problem) -> Callable:
    """``f(a, b, out)`` by torch.compile: of cdist for p = 2, where it is a matrix product, and else
    of the difference, which fuses into one kernel and holds no (M, N, K) tensor."""
    expression = plain(problem)
    if problem.p == 1:

        def expression(a, b, out):
            return finish(problem, (a[:, None] - b[None]).abs().sum(-1))

    return torch.compile(expression, dynamic=False)


def rivals(problem: Problem) -> dict[str, Callable]:
    found = {"cublas" if problem.dot else "torch": plain(problem)}
    if problem.direct or problem.hard:
        found["torch direct"] = plain_differences(problem)
    if problem.k <= COMPILED_K:
        found["torch.compile"] = compiled(problem)
    return found


def exact(problem: Problem, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of the result in float64."""
    if problem.dot:
        return a[rows].double() @ b.double().mT
    return finish(problem, exact_distances(a[rows], b, problem.p))


# A row.


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    buffers = tensors(problem, device)
    rows = sampled(problem, *buffers[:2])
    wanted = exact(problem, *buffers[:2], rows)

    def measured(name: str, call: Callable) -> tuple[float, float]:
        eager = name not in ("kernlib", "torch.compile")
        return timed(session, call, buffers, lambda out: error(problem, out[rows], wanted), eager)

    with float32_products(problem.dtype):
        ours, found = measured("kernlib", kernel(problem))
        floor, bound = problem.floor(Device.current())
        scale = UNITS_PER_MS[problem.unit]
        row = Row(problem.name, problem.unit, ours * scale, floor * scale, bound, error=found)
        row.must, row.must_error = required(problem, session), problem.must_error
        return race(row, rivals(problem), measured)


def error(problem: Problem, result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Against float64: relative Frobenius norm, or for hard data the largest relative error of one
    distance, which a norm over all would hide. Raises ValueError when it is not a number."""
    if not problem.hard:
        return relative_error(result, wanted)
    worst = ((result.double() - wanted).abs() / wanted).max().item()
    if not math.isfinite(worst):
        raise ValueError(f"the largest error against float64 is {worst}")
    return worst


def required(problem: Problem, session: Session) -> float | None:
    """The target of the fused Laplace as a multiple of this run's time for p = 1."""
    if problem.label != "laplace_l1":
        return problem.must
    if P1 not in session.ours:
        call, buffers = kernel(PROBLEMS[0]), tensors(PROBLEMS[0])
        call(*buffers)
        session.ours[P1] = session.time(call, buffers)
    return LAPLACE_OVER_P1 * session.ours[P1]


def cases(portable: bool = False) -> list[Case]:
    """All, or of products without a matrix and their gradients, and of neighbours, those measured
    with KERNLIB_PORTABLE=1."""
    if portable:
        found = [*matmul.cases(), *matmul_gradient.cases(), *nearest.cases()]
        return [case.portable() for case in found if case.name != matmul.MEMORY_NAME]
    matrices = [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
    return [
        *matrices,
        *formulas.cases(),
        *gradient.cases(),
        *matmul.cases(),
        *matmul_gradient.cases(),
        *nearest.cases(),
        *logsumexp.cases(),
        *system.cases(),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return harness.main("pairwise", cases(current().portable), SOURCE, argv)
