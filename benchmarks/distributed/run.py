"""Calls over several GPUs of one host, beside one of them alone.

``torchrun --nproc-per-node 2 -m benchmarks.distributed --json FILE``, where FILE is
``benchmarks/results/h200/distributed.json``.

Every process runs every case. The rival ``one gpu`` is the same problem in the first process, while
the others wait; ours is the time of the slowest process, which all begin together.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

import kernlib as kl
from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import relative_error
from benchmarks.distributed.models import attention_case, ddp_case
from benchmarks.distributed.timing import compared, is_first, mine, shared, size, timed
from kernlib.alone import Alone
from kernlib.distributed.communicator import as_communicator
from kernlib.linalg.falkon import checked_fit, gram_product

FALKON_ROWS, FALKON_FEATURES, CENTRES = 10_000_000, 20, 20_000
CG_POINTS, CG_ITERATIONS = 400_000, 100
KRON_ROWS, KRON_SIZES = 1024, (64, 64, 64)
SHORT_CALLS = 100  # timed at once
GATHERED, EXCHANGED = 10**6, 2**30  # bytes: of all processes, and of each


def product_case(points: int, features: int, must: float, ring: bool = False) -> Case:
    name = f"kernel_matmul gaussian {points}x{points} D={features} {'ring ' * ring}{{}} GPUs"

    def measure(session: Session) -> Row:
        x, v = shared(points, features), shared(points, 1)
        parts, names = (mine(x), mine(x), mine(v)), {"bandwidth": 1.0}

        def alone():
            return kl.kernel_matmul(kl.gaussian(), x, x, v, **names)

        def spread():
            return kl.distributed.kernel_matmul(kl.gaussian(), *parts, ring=ring, **names)

        def error() -> float:
            some = mine(x)[:1000]
            exact = kl.kernel_matmul(kl.gaussian(), some.double(), x.double(), v.double(), **names)
            return relative_error(spread()[:1000], exact)

        return compared(name.format(size()), alone, spread, error, must)

    return Case(name, measure)


def gradient_case(points: int, features: int, must: float) -> Case:
    name = f"kernel_matmul_grad gaussian {points}x{points} D={features} x+v {{}} GPUs"

    def measure(session: Session) -> Row:
        alone = [shared(points, features), shared(points, 1)]
        grads, names = (torch.ones(points, 1, device="cuda"),), {"bandwidth": 3.0}

        def step(module, x, v, grad):
            x, v = (t.detach().requires_grad_() for t in (x, v))
            module.kernel_matmul(kl.gaussian(), x, x, v, **names).backward(grad)
            return x.grad

        parts = [mine(t) for t in (*alone, *grads)]
        return compared(
            name.format(size()),
            lambda: step(kl, *alone, *grads),
            lambda: step(kl.distributed, *parts),
            None,
            must,
        )

    return Case(name, measure)


def cg_case(must: float) -> Case:
    name = f"cg gaussian {CG_POINTS} D=10 {CG_ITERATIONS} iterations {{}} GPUs"

    def measure(session: Session) -> Row:
        x, y = shared(CG_POINTS, 10), shared(CG_POINTS)
        options = {"regularization": 1.0, "bandwidth": 1.0, "tol": 0.0, "rank": 1000}
        options |= {"max_iter": CG_ITERATIONS, "check_every": CG_ITERATIONS}
        group = kl.distributed.Communicator()

        def solve(x, y, group=None):
            return kl.linalg.solve_kernel(kl.gaussian(), x, y, group=group, **options)

        solve(x[:5000], y[:5000]) if is_first() else None
        solve(mine(x[:5000]), mine(y[:5000]), group)
        parts = mine(x), mine(y)
        return compared(
            name.format(size()),
            lambda: solve(x, y),
            lambda: solve(*parts, group),
            None,
            must,
            calls=1,
        )

    return Case(name, measure)


def falkon_case(must: float) -> Case:
    name = f"falkon {FALKON_ROWS}x{FALKON_FEATURES} M={CENTRES} one pass {{}} GPUs"

    def measure(session: Session) -> Row:
        x = torch.empty((FALKON_ROWS, FALKON_FEATURES), pin_memory=True)
        x.copy_(shared(FALKON_ROWS, FALKON_FEATURES))
        y = torch.zeros((FALKON_ROWS, 1))
        centres, u = shared(CENTRES, FALKON_FEATURES), shared(CENTRES, 1).double()
        part = slice(*(FALKON_ROWS * (dist.get_rank() + k) // size() for k in (0, 1)))

        def fit(x, y):
            names = {"bandwidth": 5.0}
            return checked_fit(kl.gaussian(), x, y, centres, 1e-6, (1e-6, 20), names)

        processes = as_communicator(None)
        alone, spread = fit(x, y), fit(x[part], y[part])
        return compared(
            name.format(size()),
            lambda: gram_product(alone, Alone(), u),
            lambda: gram_product(spread, processes, u),
            None,
            must,
        )

    return Case(name, measure)


def short_case(name: str, prepared: Callable[[], Callable[[], object]]) -> Case:
    """Microseconds of a call that ``prepared`` returns, one of many in turn."""

    def measure(session: Session) -> Row:
        call = prepared()

        def calls() -> None:
            for _ in range(SHORT_CALLS):
                call()

        return Row(name.format(size()), "us", 1e3 * timed(calls, True) / SHORT_CALLS)

    return Case(name, measure)


def agreement() -> Callable[[], object]:
    processes = as_communicator(kl.distributed.Communicator())
    texts = {"descriptor": "gaussian"}
    return lambda: processes.agree("benchmark", lambda: texts, lambda: (1, 2), lambda: "benchmark")


def gather() -> Callable[[], object]:
    processes = as_communicator(kl.distributed.Communicator())
    rows = GATHERED // 4 // size()
    part, sizes = torch.zeros((rows, 1), device="cuda"), [rows] * size()
    return lambda: processes.gather(part, sizes)


def exchange_case() -> Case:
    """A process sends all of its bytes but one part of ``size``: their rate is this by the time."""
    name = f"all to all of {EXCHANGED // 2**20} MiB in each of {{}} GPUs"

    def measure(session: Session) -> Row:
        processes = as_communicator(kl.distributed.Communicator())
        count = EXCHANGED // 4 // size()
        packed, counts = torch.zeros(count * size(), device="cuda"), [count] * size()
        call = lambda: processes.exchange(packed, counts, counts)  # noqa: E731
        return Row(name.format(size()), "ms", timed(call, True))

    return Case(name, measure)


def kron_case(sharded: str, must: float, result: str | None = None) -> Case:
    to = f" to {result}" if result else ""
    name = f"kron_matmul {KRON_ROWS} 64^3 {sharded}{to} fp32 {{}} GPUs"

    def measure(session: Session) -> Row:
        factors = [shared(n, n) / n**0.5 for n in KRON_SIZES]
        x = shared(KRON_ROWS, KRON_SIZES[0] ** 3)
        along = int(sharded == "columns")
        part = mine(x, along)

        def spread():
            return kl.distributed.kron_matmul(part, factors, sharded=sharded, result=result)

        def error() -> float:
            some = mine(x)[:64] if result == "rows" else x[:64]
            exact = kl.kron_matmul(some.double(), [f.double() for f in factors])
            return relative_error(spread()[:64], exact if result == "rows" else mine(exact, 1))

        alone = lambda: kl.kron_matmul(x, factors)  # noqa: E731
        return compared(name.format(size()), alone, spread, error if along else None, must)

    return Case(name, measure)


CASES = [
    product_case(1_000_000, 3, 1.93),
    product_case(1_000_000, 3, 1.93, ring=True),
    product_case(100_000, 3, 1.75),
    gradient_case(200_000, 10, 1.9),
    cg_case(1.92),
    falkon_case(1.85),
    kron_case("columns", 0.85),
    kron_case("columns", 1.2, "rows"),
    kron_case("rows", 1.9),
    ddp_case(1.85),
    attention_case(1.7),
    short_case("agreement of {} processes", agreement),
    short_case(f"gather of {GATHERED // 10**6} MB of {{}} GPUs", gather),
    exchange_case(),
]


def main(argv=None) -> int:
    """Measure in all processes; the first one writes."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    cases = [Case(case.name.format(size()), case.measure) for case in CASES]
    source = '#include "pairwise/direct/direct.cuh"'
    try:
        if is_first():
            on = harness.machine()
            on["gpu"] = f"{size()} x {on['gpu']}"
            return harness.main("distributed", cases, source, argv, on)
        options, session = harness.parse(argv, "distributed"), Session(False)
        for case in harness.chosen(cases, options.case):
            case.measure(session)
        return 0
    finally:
        dist.destroy_process_group()
