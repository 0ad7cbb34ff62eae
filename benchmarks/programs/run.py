"""Whole steps of programs: kernlib beside torch and GPyTorch, all of a row in turn.

``python -m benchmarks.programs --json benchmarks/results/h200/programs.json``

Rows in microseconds are the host's time of a step or call, those in milliseconds times from event
to event of steps in a row. Targets are ratios of two times of the same row. A whole run takes
minutes, most of which is compiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session
from benchmarks.programs import chains, gaussian_process, llama, mlps, steps, vision
from benchmarks.programs.problems import Program, measure

FAMILY = "programs"
OPERATIONS = ("pairwise", "kronecker_sparse", "kronecker_product", "blocksparse", "sparse")
INCLUDED = ("common/math.cuh", *(name for f in OPERATIONS for name in harness.headers(f)))
SOURCE = "\n".join(f'#include "{name}"' for name in INCLUDED)


def programs() -> list[Program]:
    some = (steps, mlps, gaussian_process, chains, vision)
    return [program for module in some for program in module.programs()]


def tidied(program: Program, session: Session) -> Row:
    row = measure(program, session)
    torch.cuda.empty_cache()  # tensors in ever other sizes
    return row


def cases() -> list[Case]:
    some = [Case(program.name, partial(tidied, program)) for program in programs()]
    return [*some, *llama.cases()]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases and print their table. Returns the exit status."""
    return harness.main(FAMILY, cases(), SOURCE, argv)
