"""Whether the processes of a job exchange what calls need: a small all-reduce, by each backend."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from kernlib.cli.checks import Finding
from kernlib.cli.job.differences import listed
from kernlib.cli.machine import milliseconds

NUMBERS, REPEATS = 1024, 5
# Of a first exchange. It is less than the others wait for this process to tell how it went.
NCCL_S = 30.0
ADVICE = {
    "gloo": "GLOO_SOCKET_IFNAME names the network interface between the hosts",
    "NCCL": "NCCL_DEBUG=INFO says on stderr what NCCL does, and NCCL_SOCKET_IFNAME names the "
    "network interface between the hosts",
}


def by_gloo(group: dist.ProcessGroup) -> dict:
    """Milliseconds as ``ms``, or what went wrong as ``error``."""
    try:
        return _all_reduce(group, torch.device("cpu"))
    except Exception as error:
        return _failure(error)


def by_nccl(device: torch.device) -> dict:
    """The same of NCCL, of all processes. What hangs there cannot be ended, and stays behind in its
    thread."""
    if not dist.is_nccl_available():
        return {"error": "this torch has no NCCL"}
    results: list[dict] = []

    def work() -> None:
        try:
            torch.cuda.set_device(device)  # of this thread
            # A watchdog of torch would end the process after the group's timeout.
            timeout = timedelta(seconds=20 * NCCL_S)
            results.append(_all_reduce(dist.new_group(backend="nccl", timeout=timeout), device))
        except Exception as error:
            results.append(_failure(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(NCCL_S)
    return results[0] if results else {"error": f"no answer in {NCCL_S:g} s"}


def findings_of(results: list[dict]) -> list[Finding]:
    """A line for each backend, of what the processes say of it, by rank. A call takes as long as in
    the slowest."""
    findings = []
    for name in results[0]:
        answers = [result[name] for result in results]
        ranks: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if "error" in answer:
                ranks.setdefault(answer["error"], []).append(rank)
        if ranks:
            text = ", ".join(f"{listed(at)}: {error}" for error, at in ranks.items())
            findings.append(Finding(name, text, ADVICE[name], needed=True))
            continue
        slowest = max(answer["ms"] for answer in answers)
        text = f"an all-reduce of {4 * NUMBERS} bytes takes {milliseconds(slowest)} ms"
        findings.append(Finding(name, text, details={"ms": slowest}))
    return findings


def _all_reduce(group: dist.ProcessGroup, device: torch.device) -> dict:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    times = []
    for _ in range(REPEATS):
        t = torch.full((NUMBERS,), rank + 1.0, dtype=torch.float32, device=device)
        begin = time.perf_counter()
        dist.all_reduce(t, group=group)
        total = float(t[-1])  # which waits for a GPU
        times.append(1e3 * (time.perf_counter() - begin))
    if total != size * (size + 1) / 2:
        return {"error": f"the sum is {total:g} in place of {size * (size + 1) / 2:g}"}
    return {"ms": min(times)}


def _failure(error: Exception) -> dict:
    return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
