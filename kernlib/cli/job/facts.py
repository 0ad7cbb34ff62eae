"""What a process of a job says of itself: a dict that any version of kernlib can read."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

import kernlib
from kernlib.cli import machine, places
from kernlib.cli.checks import CHECKS, Finding, checked

Process = dict[str, Any]


def of_this_process(rank: int) -> Process:
    """Rank, host, local rank; device, None for a CPU; driver, versions, cache, and the lines of
    `kernlib doctor` here."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    findings = [finding for label, check in CHECKS for finding in checked(label, check)]
    try:
        device = _device(local)
    except Exception as error:  # of a GPU that is there and does not answer
        text, advice = f"{type(error).__name__}: {error}", "nvidia-smi says what is wrong with it"
        findings.append(Finding("GPU", text, advice, needed=True))
        device = None
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "local_rank": local,
        "device": device,
        "driver": _details("driver", findings).get("version"),
        "versions": _versions(),
        "cache": {
            "folder": _folder(),
            "writable": _details("cache", findings).get("kind") == "lmdb",
        },
        "findings": [finding.facts() for finding in findings],
    }


def _details(label: str, findings: list[Finding]) -> dict:
    """Those of the first line with a label."""
    return next((finding.details for finding in findings if finding.label == label), {})


def _device(local: int) -> dict | None:
    """The GPU of a local rank. Where there are fewer GPUs than processes, several have the same."""
    gpus = machine.gpus()
    if not gpus:
        return None
    gpu = gpus[local % len(gpus)]
    properties = torch.cuda.get_device_properties(gpu.index)
    facts = {"index": gpu.index, "name": gpu.name, "arch": gpu.arch}
    return facts | {"memory": properties.total_memory, "uuid": str(properties.uuid)}


def _versions() -> dict[str, str]:
    """Of what all processes must have alike; "none" for what this one has not."""
    nccl = "none"
    if dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    cuda = torch.version.cuda or "none"
    torch_version = str(torch.__version__)
    return {"kernlib": kernlib.__version__, "torch": torch_version, "CUDA": cuda, "NCCL": nccl}


def _folder() -> str | None:
    """The cache's; None where the setting cannot be used."""
    try:
        return os.path.realpath(places.folder())
    except ValueError:
        return None
