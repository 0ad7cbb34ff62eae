"""Two processes on one GPU, what a process pays to start, and forks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.behaviour.clocks import SOURCE
from benchmarks.behaviour.page import Table
from benchmarks.behaviour.texts.processes import TEXTS
from benchmarks.common.device_code import cell, compiled

TITLE = "processes on one GPU"

CHILDREN = "benchmarks.behaviour.children"
MS = 1_000_000
REPETITIONS = 3
LONG_MS = 30


class Bare(NamedTuple):
    """A process with the driver alone, and what it answered first."""

    process: subprocess.Popen
    ready: dict[str, float]

    @classmethod
    def start(cls, cubin: Path) -> Bare:
        command = [sys.executable, "-m", f"{CHILDREN}.bare", str(cubin)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        return cls(process, json.loads(process.stdout.readline()))

    def send(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        return json.loads(self.process.stdout.readline())

    def tell(self, command: str) -> object:
        self.send(command)
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(20)


def lines(module: str) -> list[list[object]]:
    """What a child printed, also where it failed in between."""
    command = [sys.executable, "-m", f"{CHILDREN}.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    answers = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("[")]
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [""])[-1]
        answers.append(["failed", f"exit {done.returncode}: {error[:150]}", None, None])
    return answers


def shown(times: list[float]) -> str:
    """Median and largest of microseconds."""
    return f"{statistics.median(times):,.0f} ({times[-1]:,.0f})"


def sharing(cubin: Path) -> list[Table]:
    """Two processes with work at one time, beside two streams of one."""
    torch.cuda.init()
    free = torch.cuda.mem_get_info()[0]
    first = Bare.start(cubin)
    held = (free - torch.cuda.mem_get_info()[0]) >> 20
    second = Bare.start(cubin)
    try:
        alone = second.tell(f"latency {REPETITIONS}")
        columns: dict[str, dict[str, list[float]]] = {"alone": alone}
        for ns, count in ((LONG_MS * MS, 12), (MS // 50, 15000)):
            label = f"beside kernels of {ns / MS:g} ms of another process"
            columns[label] = {}
            for only in range(len(alone)):
                first.send(f"spin {ns} {count}")
                time.sleep(0.02)
                columns[label] |= second.tell(f"latency {REPETITIONS} {only}")
                first.answer()
        label = f"beside kernels of {LONG_MS} ms of another stream"
        columns[label] = {}
        for only in range(len(alone)):
            columns[label] |= second.tell(f"beside {LONG_MS * MS} 8 {REPETITIONS} {only}")
        rows = [[name, *(shown(c[name]) for c in columns.values())] for name in alone]
        short = Table("A short call beside long kernels", TEXTS["short"], ["", *columns], rows)

        rows = []
        for ns, count in ((MS, 200), (10 * MS, 20), (MS // 50, 5000)):
            one = first.tell(f"spin {ns} {count}")
            first.send(f"spin {ns} {count}")
            both = [second.tell(f"spin {ns} {count}"), first.answer()]
            label = f"{count} kernels of {ns / MS:g} ms"
            rows.append([label, f"{one:.3f}", *(f"{s:.3f}" for s in both)])
        first.send(f"spin {100 * MS} 5")
        time.sleep(0.05)
        label = "100 kernels of 1 ms, the other one's 5 of 100 ms"
        one = second.tell(f"spin {MS} 100")
        rows.append([label, "0.100", f"{one:.3f}", f"{first.answer():.3f}"])
        columns = ["each process", "s alone", "s of one beside the other", "s of the other"]
        slices = Table("Work of two processes", TEXTS["slices"], columns, rows)

        first.send(f"spin {100 * MS} 15")
        time.sleep(0.05)
        third = Bare.start(cubin)
        busy = third.ready
        third.close()
        first.answer()
        pair = second.ready, busy
        rows = [
            ["memory that its context takes, MiB, with 64 MiB of its own", held, ""],
            [
                "seconds to make its context",
                *(f"{r['context_s']:.3f}" for r in pair),
            ],
            [
                "seconds until it has run a kernel",
                *(f"{r['ready_s']:.3f}" for r in pair),
            ],
        ]
        columns = ["a process with the driver alone", "", "while another one's kernels run"]
        return [short, slices, Table("A bare context", TEXTS["bare"], columns, rows)]
    finally:
        for child in (first, second):
            cell(child.close)


def starting() -> Table:
    """Stages of a process with torch and a filled cache of kernlib."""
    x = torch.zeros(512, 512, device="cuda")
    kl.cdist(x, x)
    kl.run_kernel(kl.gaussian(), x, x, bandwidth=8.0)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    rows = []
    for name, seconds, used, after in lines("starting"):
        if used is None and after is not None:  # the stage that made the context
            used = (free - after) >> 20
        shown_s = "" if seconds is None else f"{float(seconds) * 1e3:.1f}"
        rows.append([name, shown_s, "" if used is None else used])
    columns = ["stage", "ms", "MiB of the device"]
    return Table("A process with torch", TEXTS["starting"], columns, rows)


def forks() -> list[Table]:
    """What works in the child of a fork."""
    answers = lines("forking")
    before = [[name, text] for kind, name, text, *_ in answers if kind == "before"]
    after = [list(a[1:3]) for a in answers if a[0] != "before"]
    return [
        Table(
            "A fork before CUDA is initialised",
            TEXTS["before"],
            ["what the parent did", "torch.ones(2, device='cuda') in the child"],
            before,
        ),
        Table("A fork afterwards", TEXTS["after"], ["in the child", "what it answers"], after),
    ]


def measure() -> list[Table]:
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        cubin.write_bytes(compiled(SOURCE))
        for part in (lambda: sharing(cubin), lambda: [starting()], forks):
            answer = cell(part)
            failed = [Table("Failed", str(answer), ["failed"], [])]
            tables += answer if isinstance(answer, list) else failed
    return tables
