"""``kernlib doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click

from kernlib import progress
from kernlib.cli import checks
from kernlib.cli.checks import Finding
from kernlib.cli.options import json_option
from kernlib.cli.output import print_json, say
from kernlib.errors import INSTALL

CHECKS = (
    ("kernlib", checks.kernlib),
    ("torch", checks.torch),
    ("driver", checks.driver),
    ("GPU", checks.gpus),
    ("wheels", checks.wheels),
    ("headers", checks.headers),
    ("compile", checks.compiles),
    ("settings", checks.settings),
    ("cache", checks.store),
    ("bundle", checks.bundles),
)
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
@json_option
def doctor(as_json: bool) -> None:
    """Check this machine, and say what to do about what is missing.

    Looks at torch, GPUs, the compiler, settings and the cache. A line that begins with note is
    worth a look, one with FAIL keeps kernels from being compiled or kept. The last lines say what
    to do next. Exits with 1 if there is one of those.
    """
    findings = []
    for finding in _all():
        findings.append(finding)
        if not as_json:
            _print(finding)
    steps = next_steps(findings)
    failed = any(finding.mark == "FAIL" for finding in findings)
    if as_json:
        facts = [finding.facts() for finding in findings]
        print_json({"ok": not failed, "findings": facts, "next": steps})
    else:
        _print_steps(steps)
    if failed:
        raise click.exceptions.Exit(1)


def next_steps(findings: list[Finding]) -> list[str]:
    """What to do, what keeps kernels from being compiled or kept before the rest."""
    steps = []
    for mark in ("FAIL", "note"):
        labels: dict[str, list[str]] = {}  # of findings that one advice serves
        for finding in findings:
            if finding.mark == mark:
                labels.setdefault(finding.advice, []).append(finding.label)
        steps += [f"{', '.join(dict.fromkeys(of))}: {advice}" for advice, of in labels.items()]
    if any(finding.mark == "FAIL" for finding in findings):
        return [*steps, "then run `kernlib doctor` again"]
    if any(finding.details.get("arch") for finding in findings if finding.label.startswith("GPU")):
        return [*steps, "run `kernlib demo`, and `kernlib bench` to time this GPU"]
    # Where a GPU is here, and not used, that is among the steps.
    here = any(finding.advice for finding in findings if finding.label.startswith(OF_GPUS))
    return [*steps, *(() if here else (GET_A_GPU,)), *WITHOUT_A_GPU]


def _all() -> Iterator[Finding]:
    for label, check in CHECKS:
        yield from _findings(label, check)


def _findings(label: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        with progress.busy(f"checking {label}"):
            return check()
    except Exception as error:  # a check that breaks is a finding, and the others still run
        advice = "fix what this message names, then run kernlib doctor again"
        return [Finding(label, f"{type(error).__name__}: {error}", advice, needed=True)]


def _print(finding: Finding) -> None:
    start = f"{finding.mark:4s}  {finding.label:10s}  "
    say(finding.text, start=start, hang=" " * len(start))


def _print_steps(steps: list[str]) -> None:
    click.echo("\nWhat to do next:")
    for number, step in enumerate(steps, 1):
        start = f"  {number}. "
        say(step, start=start, hang=" " * len(start))
