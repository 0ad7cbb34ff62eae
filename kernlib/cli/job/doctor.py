"""The run of ``kernlib doctor --distributed``: every process says what it has, and all of them try
to exchange; the first prints the report."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, NoReturn

import click
import torch
import torch.distributed as dist

from kernlib.cli.checks import Finding, advised
from kernlib.cli.job import exchange, facts
from kernlib.cli.job.differences import differences, of_checks, suits_nccl
from kernlib.cli.job.facts import Process
from kernlib.cli.output import print_finding, print_json, print_steps, print_table, size
from kernlib.distributed.communicator import TIMEOUT, Communicator, Processes, as_communicator
from kernlib.errors import DistributedError

TASK = "kernlib doctor --distributed"
LAUNCH = (
    "--distributed is for the processes that torchrun starts: `torchrun --nproc-per-node gpu -m "
    "kernlib doctor --distributed`, on each host of several with --nnodes, --node-rank and "
    "--master-addr; without GPUs, --nproc-per-node has a number"
)
COLUMNS = {
    "rank": "right",
    "host": "left",
    "local": "right",
    "device": "left",
    "memory": "right",
    "driver": "left",
    "torch": "left",
    "kernlib": "left",
    "NCCL": "left",
    "checks": "left",
    "cache": "left",
}
SPARE = "memory", "local", "NCCL", "driver", "kernlib", "torch"
AGAIN = "then run `kernlib doctor --distributed` by torchrun again"
DEMO = (
    "run `torchrun --nproc-per-node {} -m kernlib.distributed.demo`: it compares products of all "
    "processes with those of one"
)


class Report(NamedTuple):
    """What all processes say: of themselves, what follows from it, and how they exchanged."""

    processes: list[Process]
    differences: list[Finding]
    exchange: list[Finding]

    @property
    def findings(self) -> list[Finding]:
        return [*of_checks(self.processes), *self.differences, *self.exchange]

    @property
    def failed(self) -> bool:
        return any(finding.mark == "FAIL" for finding in self.findings)

    @property
    def steps(self) -> list[str]:
        demo = DEMO.format(os.environ.get("LOCAL_WORLD_SIZE", "gpu"))
        return [*advised(self.findings), AGAIN if self.failed else demo]


def examine(as_json: bool) -> None:
    """Print the report in the first process. Raises UsageError without torchrun, and Exit with 1,
    in all of them, for a FAIL in one. Where processes do not meet or answer, it ends this one with
    a message and 1."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise click.UsageError(LAUNCH)
    try:
        with _stdout_to_stderr():
            communicator = _started()
            report = _report(communicator)
        if communicator.rank == 0:
            (_print_json if as_json else _print)(report)
            sys.stdout.flush()
        communicator.collect(TASK, None)  # as torchrun ends all processes when one ends with 1
    except DistributedError as error:
        click.ClickException(str(error)).show()
        _leave()
    if any(finding.label == "NCCL" and finding.mark == "FAIL" for finding in report.exchange):
        _leave()
    dist.destroy_process_group()
    if report.failed:
        raise click.exceptions.Exit(1)


def _leave() -> NoReturn:
    """End at once with 1: what a backend has begun may have no end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What libraries print, as NCCL does with NCCL_DEBUG, goes to stderr: the report has stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _started() -> Processes:
    """The processes over gloo: NCCL comes later, where each has a GPU of its own. Raises
    DistributedError for processes that do not meet."""
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    except (RuntimeError, ValueError) as error:
        environ = os.environ
        address = f"{environ.get('MASTER_ADDR', '?')}:{environ.get('MASTER_PORT', '?')}"
        raise DistributedError(
            f"{TASK}: the processes do not meet at {address} within {TIMEOUT:g} s, seen from rank "
            f"{environ['RANK']} of {environ['WORLD_SIZE']}: {str(error).partition(chr(10))[0]}"
        ) from error
    return as_communicator(Communicator(timeout=TIMEOUT))


def _report(communicator: Processes) -> Report:
    """Raises DistributedError for a process that does not answer."""
    process = facts.of_this_process(communicator.rank)
    processes = communicator.collect(TASK, process)
    results = {"gloo": exchange.by_gloo(communicator.control)}
    if suits_nccl(processes):
        results["NCCL"] = exchange.by_nccl(torch.device("cuda", process["device"]["index"]))
    exchanged = exchange.findings_of(communicator.collect(TASK, results))
    return Report(processes, differences(processes), exchanged)


def _print_json(report: Report) -> None:
    listed = {
        "differences": [finding.facts() for finding in report.differences],
        "exchange": [finding.facts() for finding in report.exchange],
    }
    processes = {"processes": report.processes}
    print_json({"ok": not report.failed, **processes, **listed, "next": report.steps})


def _print(report: Report) -> None:
    folders = Counter(_place(process) for process in report.processes)
    rows = [_row(process, folders[_place(process)] > 1) for process in report.processes]
    print_table(COLUMNS, rows, spare=SPARE)
    click.echo()
    for finding in report.findings:
        print_finding(finding.mark, finding.label, finding.text)
    print_steps(report.steps)


def _place(process: Process) -> tuple[str, str | None]:
    return process["host"], process["cache"]["folder"]


def _row(process: Process, is_shared: bool) -> tuple:
    device, versions, cache = process["device"], process["versions"], process["cache"]
    name, memory = "CPU", ""
    if device:
        name, memory = f"{device['name']}, {device['arch'] or 'no kernels'}", size(device["memory"])
    words = "shared" if is_shared else "", "writable" if cache["writable"] else "not written"
    return (
        *(process["rank"], process["host"], process["local_rank"], name, memory),
        *(process["driver"] or "", versions["torch"], versions["kernlib"], versions["NCCL"]),
        _counts(process["findings"]),
        ", ".join(filter(None, (cache["folder"] or "", *words))),
    )


def _counts(findings: list[dict]) -> str:
    """``14 ok, 1 note``."""
    counts = Counter(finding["status"] for finding in findings)
    shown = {"ok": "ok", "note": "note", "fail": "FAIL"}
    return ", ".join(f"{counts[status]} {text}" for status, text in shown.items() if counts[status])
