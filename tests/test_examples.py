"""Every example runs as a user runs it, and finds itself right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


def run(example: Path, cache_dir: Path, **variables: str) -> subprocess.CompletedProcess:
    # One thread: several, beside another test's, wait for each other, 70 s in place of 11.
    variables = {"KERNLIB_CACHE_DIR": str(cache_dir), "OMP_NUM_THREADS": "1"} | variables
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, str(example)],
        env=environment,
        cwd=cache_dir,
        capture_output=True,
        text=True,
    )


def test_there_are_examples():
    names = {example.name for example in EXAMPLES}
    assert {"quickstart.py", "custom_epilogue.py", "kronecker_vit.py"} <= names


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_the_cpu(example, tmp_path):
    found = run(example, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 0, found.stderr
    assert "cpu   relative error" in found.stdout
    assert found.stderr == ""


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_the_gpu(example, tmp_path):
    found = run(example, tmp_path)
    assert found.returncode == 0, found.stderr
    assert "cuda  relative error" in found.stdout
