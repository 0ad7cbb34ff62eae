"""Small odd calls of attention, to be run under compute-sanitizer; prints the kinds that ran."""

from __future__ import annotations

import sys

import torch

from kernlib import events
from kernlib.families.blocksparse.lowering.attention import portable, portable_gradient
from tests.families.blocksparse.lowering.attention.cases import ARCH, CASES, Made
from tests.families.blocksparse.lowering.attention.gradients import Gradients
from tests.gpu.families.blocksparse.attention.launches import launch


def attention() -> None:
    for case in CASES.values():
        made = Made(case)
        for choice in portable.candidates(made.problem(), ARCH):
            made.run(launch, choice["rows"])
        made.check()


def gradients() -> None:
    for case in CASES.values():
        made = Gradients(case, grad_lse=True)
        for choice in portable_gradient.candidates(made.problem(), ARCH):
            made.run(launch, choice)
        made.check()


def main(tool: str) -> None:
    kinds = set()
    events.subscribe(lambda e: e.name == "launch" and kinds.update(e.description.split()[1:4]))
    with torch.device("cuda"):
        attention()
        gradients()
    torch.cuda.synchronize()
    print("done", *sorted(kinds))


if __name__ == "__main__":
    main(sys.argv[1])
