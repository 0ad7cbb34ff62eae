"""compute-sanitizer over small odd calls of each format, each tool in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
# cuda-bindings asks an older driver for functions it lacks, which is no error of ours.
OPTIONS = ("--error-exitcode", "9", "--report-api-errors", "no")
CALLS = Path(__file__).with_name("sparse_sanitized_calls.py")


@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_no_bad_access_and_no_race(tool):
    # Without torch's pool every tensor is an allocation of its own, with guards behind it.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [SANITIZER, "--tool", tool, *OPTIONS, sys.executable, str(CALLS), tool],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0 and "done" in done.stdout, report
