"""compute-sanitizer over the calls of a module, each run in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
# cuda-bindings asks an older driver for functions it lacks, which is no error of ours.
OPTIONS = ("--error-exitcode", "9", "--report-api-errors", "no")
needed = pytest.mark.skipif(
    not os.path.exists(SANITIZER), reason="compute-sanitizer is not installed"
)


def launched(tool: str, module: str, argument: str, timeout_s: int = 300) -> set[str]:
    """What ``python -m module argument`` says that it has launched, its line ``done ...``, after
    ``tool`` found nothing wrong with it."""
    # Without torch's pool every tensor is an allocation of its own, with guards behind it.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [SANITIZER, "--tool", tool, *OPTIONS, sys.executable, "-m", module, argument],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    report = done.stdout[-3000:] + done.stderr[-3000:]
    if done.returncode != 0:
        name = f"{tool}-{module.split('.')[-2]}-{argument.replace('/', '-')}.log"
        _keep(name, done.stdout + done.stderr)
    assert done.returncode == 0, report
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("done")]
    assert len(said) == 1, report
    return set(said[0])


def _keep(name: str, report: str) -> None:
    """Beside the record, where a run has one of its own: a run that ends early says no more."""
    if record := os.environ.get("KERNLIB_GPU_RECORD"):
        Path(record).with_name(name).write_text(report)
