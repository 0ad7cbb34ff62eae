"""``kernlib doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from kernlib import progress
from kernlib.cli import checks
from kernlib.cli.checks import Finding, advised
from kernlib.cli.options import json_option
from kernlib.cli.output import print_finding, print_json, print_steps
from kernlib.errors import INSTALL

OF_GPUS = ("torch", "driver", "GPU")  # what decides whether torch sees a GPU
GET_A_GPU = (
    "kernels run on an NVIDIA GPU since sm_80 with a driver since 525, and there is none here. On "
    f"a machine that has them: {INSTALL}"
)
WITHOUT_A_GPU = (
    "calls on CPU tensors need nothing more: run `kernlib demo`, then README's first example and "
    "those of examples/",
    "`kernlib compile --arch ARCH` makes kernels for GPUs of other machines",
)


@click.command()
@click.option(
    "--distributed",
    is_flag=True,
    help="Check all processes that torchrun has started: what differs, and whether they exchange.",
)
@json_option
def doctor(distributed: bool, as_json: bool) -> None:
    """Check this machine, and say what to do about what is missing.

    Looks at torch, GPUs, the compiler, settings and the cache. A line that begins with note is
    worth a look, one with FAIL keeps kernels from being compiled or kept. The last lines say what
    to do next. Exits with 1 if there is a line with FAIL.

    With --distributed it prints one table of all processes that torchrun has started with it, on
    this host or several: torchrun --nproc-per-node gpu -m kernlib doctor --distributed
    """
    if distributed:
        from kernlib.cli.job import doctor as of_job

        of_job.examine(as_json)
        return
    findings = []
    for finding in _all():
        findings.append(finding)
        if not as_json:
            print_finding(finding.mark, finding.label, finding.text)
    steps = next_steps(findings)
    failed = any(finding.mark == "FAIL" for finding in findings)
    if as_json:
        facts = [finding.facts() for finding in findings]
        print_json({"ok": not failed, "findings": facts, "next": steps})
    else:
        print_steps(steps)
    if failed:
        raise click.exceptions.Exit(1)


def next_steps(findings: list[Finding]) -> list[str]:
    """What to do, what keeps kernels from being compiled or kept before the rest."""
    steps = advised(findings)
    if any(finding.mark == "FAIL" for finding in findings):
        return [*steps, "then run `kernlib doctor` again"]
    if any(finding.details.get("arch") for finding in findings if finding.label.startswith("GPU")):
        return [*steps, "run `kernlib demo`, and `kernlib bench` to time this GPU"]
    # Where a GPU is here, and not used, that is among the steps.
    here = any(finding.advice for finding in findings if finding.label.startswith(OF_GPUS))
    return [*steps, *(() if here else (GET_A_GPU,)), *WITHOUT_A_GPU]


def _all() -> Iterator[Finding]:
    for label, check in checks.CHECKS:
        with progress.busy(f"checking {label}"):
            findings = checks.checked(label, check)
        yield from findings
