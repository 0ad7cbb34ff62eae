"""Small odd calls of attention, to be run under compute-sanitizer; prints the kinds that ran."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from kernlib import events
from kernlib.families.blocksparse.kernels.attention import hopper
from kernlib.families.blocksparse.kernels.attention.gradient import hopper as hopper_gradient
from tests.families.blocksparse.lowering.attention import cases as cases_of
from tests.families.blocksparse.lowering.attention import gradients as gradients_of
from tests.families.blocksparse.lowering.attention.cases import (
    ARCH,
    CASES,
    HOPPER,
    Case,
    Made,
    launches_of,
)
from tests.families.blocksparse.lowering.attention.gradients import (
    Gradients,
    check_sums,
    soft_tensors,
    sums_of,
)
from tests.families.blocksparse.lowering.attention.scores import soft_bias
from tests.gpu.every_lane import BY_WARP, let_every_lane_arrive
from tests.gpu.families.blocksparse.attention.launches import launch

_FULL = "barrier_arrive(&s.barriers().full[ring.stage]);"
_FULL_GRADIENT = "barrier_arrive(&s.barriers->full[ring.stage]);"
ARRIVALS = BY_WARP | {
    "blocksparse/attention/hopper/parameters.cuh": (
        ("barrier_init(&own.full[stage], 1)", "barrier_init(&own.full[stage], 32)"),
        ("&own.empty[stage], 4 *", "&own.empty[stage], 128 *"),
        ("&own.q_empty, 4 *", "&own.q_empty, 128 *"),
    ),
    "blocksparse/attention/hopper/produce.cuh": (
        ("full, SLOT_BYTES);", "full, SLOT_BYTES); else barrier_arrive(full);"),
        (f"{_FULL}\n    }}", f"}}\n    {_FULL}"),
    ),
    "blocksparse/attention/gradient/hopper/parameters.cuh": (
        ("barrier_init(&barriers->full[stage], 1)", "barrier_init(&barriers->full[stage], 32)"),
        ("&barriers->empty[stage], CONSUMERS / 32", "&barriers->empty[stage], CONSUMERS"),
    ),
    "blocksparse/attention/gradient/hopper/produce.cuh": (
        (
            "full, 2 * SLOT_BYTES + bytes);\n    }",
            "full, 2 * SLOT_BYTES + bytes);\n    } else barrier_arrive(full);",
        ),
        (f"{_FULL_GRADIENT}\n    }}", f"}}\n    {_FULL_GRADIENT}"),
    ),
}


def attention(cases: Iterable[Case]) -> None:
    for case in cases:
        made = Made(case)
        for choice in cases_of.PORTABLE.choices(made.problem(), ARCH):
            made.run(launch, choice["rows"])
        made.check()


def attention_by_wgmma(cases: Iterable[Case]) -> None:
    """A team has several tiles on so few multiprocessors."""
    for case in cases:
        made = Made(case._replace(values=case.features))
        for choice in HOPPER.choices(made.problem(), hopper.ARCH):
            made.launch(launch, launches_of(HOPPER, made.problem(), choice, hopper.ARCH, 3))
            made.check()


def gradients(cases: Iterable[Case]) -> None:
    for case in cases:
        made = Gradients(case, grad_lse=True)
        for choice in gradients_of.PORTABLE.choices(made.problem(), ARCH):
            made.run(launch, choice)
        made.check()


def gradients_by_wgmma(cases: Iterable[Case]) -> None:
    for case in cases:
        made = Gradients(case._replace(values=case.features), grad_lse=True)
        if gradients_of.HOPPER.takes(made.problem(), hopper.ARCH):
            for choice in gradients_of.HOPPER.choices(made.problem(), hopper.ARCH):
                made.run(launch, choice, kernel=gradients_of.HOPPER)
                made.check()


def collected_by_wgmma(columns: Iterable[tuple[int, tuple[int, int]]]) -> None:
    whole = Case(queries=75, batch=2, heads=4, kv_heads=2, density=0.8)
    for keys, pairs in columns:
        case = soft_bias(whole._replace(keys=keys))
        given = soft_tensors(case, pairs)
        made = Gradients(case, given)
        for rows in hopper_gradient.TILE_ROWS:
            sums = sums_of(case, pairs)
            made.run(launch, {"rows": rows}, sums=sums, kernel=gradients_of.HOPPER)
            made.check()
            check_sums(made, sums, given)


# Even and odd numbers of columns, and sums over batches.
COLUMNS = ((90, (2, 4)), (91, (2, 4)), (90, (1, 4)))
PORTABLE = {"attention": attention, "gradients": gradients}
BY_WGMMA = {
    "attention-wgmma": attention_by_wgmma,
    "gradients-wgmma": gradients_by_wgmma,
    "collected-wgmma": collected_by_wgmma,
}
SHARES = 3  # of the cases, each a process: nearly all of its time is the compiler's


def main(part: str, share: int, tool: str) -> None:
    kinds = set()
    if tool == "racecheck":
        let_every_lane_arrive(ARRIVALS)
    events.subscribe(lambda e: e.name == "launch" and kinds.update(e.description.split()[1:4]))
    every = COLUMNS if part.startswith("collected") else tuple(CASES.values())
    with torch.device("cuda"):
        (PORTABLE | BY_WGMMA)[part](every[share::SHARES])
    torch.cuda.synchronize()
    print("done", *sorted(kinds))


if __name__ == "__main__":
    which, number, checked_by = sys.argv[1].split("/")
    main(which, int(number), checked_by)
