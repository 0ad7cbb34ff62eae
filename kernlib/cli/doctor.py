"""``kernlib doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click

from kernlib.cli import cache_checks, checks
from kernlib.cli.checks import Finding
from kernlib.cli.options import json_option
from kernlib.cli.output import print_json

CHECKS = (
    ("kernlib", checks.kernlib),
    ("torch", checks.torch),
    ("driver", checks.driver),
    ("GPU", checks.gpus),
    ("wheels", checks.wheels),
    ("headers", checks.headers),
    ("compile", checks.compiles),
    ("settings", checks.settings),
    ("cache", cache_checks.store),
    ("bundle", cache_checks.bundles),
)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check this machine, and say what to do about what is missing.

    Looks at torch, GPUs, the compiler, settings and the cache. A line that begins with note is
    worth a look, one with FAIL keeps kernels from being compiled or kept. The last lines say what
    to do next. Exits with 1 if there is one of those.
    """
    found = []
    for finding in _all():
        found.append(finding)
        if not as_json:
            _print(finding)
    failed = any(finding.mark == "FAIL" for finding in found)
    if as_json:
        print_json({"ok": not failed, "findings": [finding.facts() for finding in found]})
    if failed:
        raise click.exceptions.Exit(1)


def _all() -> Iterator[Finding]:
    for label, check in CHECKS:
        yield from _findings(label, check)


def _findings(label: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a check that breaks is a finding, and the others still run
        advice = "fix what this message names, then run kernlib doctor again"
        return [Finding(label, f"{type(error).__name__}: {error}", advice, needed=True)]


def _print(finding: Finding) -> None:
    click.echo(f"{finding.mark:4s}  {finding.label:10s}  {finding.text}")
    if finding.advice:
        click.echo(f"{'':18s}-> {finding.advice}")
