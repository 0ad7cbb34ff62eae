"""compute-sanitizer over small odd calls of each kind of kernel, each tool in a process of its
own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
# cuda-bindings asks an older driver for functions it lacks, which is no error of ours.
OPTIONS = ("--error-exitcode", "9", "--report-api-errors", "no")
CALLS = Path(__file__).with_name("kronecker_sparse_sanitized_calls.py")
# What the calls must have launched, by the second word of their descriptions.
HOPPER = {"interleaved", "hopper", "gradient", "pack", "turn"}
LAUNCHED = {"portable": {"portable", "weights", "sum"}, "hopper": HOPPER, "engine": HOPPER}
PORTABLE_RUNS = [("memcheck", "portable"), ("racecheck", "portable")]
# Racecheck takes no mbarrier for what orders the copies of threads before another warp's reads: of
# the kernels that are built of those it sees the ones whose copies the copy engine makes.
HOPPER_RUNS = [("memcheck", "hopper"), ("racecheck", "engine")]
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize(("tool", "kernels"), PORTABLE_RUNS + HOPPER_RUNS * ON_HOPPER)
def test_no_bad_access_and_no_race(tool, kernels):
    # Without torch's pool every tensor is an allocation of its own, with guards behind it.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [SANITIZER, "--tool", tool, *OPTIONS, sys.executable, str(CALLS), kernels],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, report
    (ran,) = (line.split() for line in done.stdout.splitlines() if line.startswith("done "))
    assert set(ran) >= LAUNCHED[kernels]
