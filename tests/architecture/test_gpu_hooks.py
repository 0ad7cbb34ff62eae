"""Sessions of pytest, with a torch that says it has a GPU, write the GPU record."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch

from tests.support import record
from tests.support.limits import LIMIT_S

GPU_TEST = """
import os
import pytest


def test_ok(device, seed):
    assert device == "cuda" and "kernlib-cache" in os.environ["KERNLIB_CACHE_DIR"]


@pytest.mark.xfail
def test_expected():
    assert False
"""

FAKE_GPU = """
import torch
import benchmarks.common.harness
torch.cuda.is_available = lambda: True
benchmarks.common.harness.machine = lambda: dict(gpu="G", driver="", torch="", nvrtc="", date="")
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the hooks need, with GPU tests of both families."""
    root = tmp_path / "checkout"
    for name in ("kernlib", "kernel_sources", "benchmarks"):
        shutil.copytree(record.ROOT / name, root / name)
    for name in ("conftest", "__init__", "support/__init__", "support/paths", "gpu/__init__",
                 "support/early", "support/gpu_kernels", "support/meaning", "support/record",
                 "support/selection", "support/speeds"):  # fmt: skip
        (root / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(record.ROOT / "tests" / f"{name}.py", root / "tests" / f"{name}.py")
    shutil.copy(record.ROOT / "pyproject.toml", root)
    (root / "fake_gpu.py").write_text(FAKE_GPU)
    for folder in record.folders().values():
        own = root / folder.relative_to(record.ROOT)
        own.mkdir(parents=True)
        (own / "__init__.py").touch()
        (own / "test_x.py").write_text(GPU_TEST)
    return root


def run_pytest(root, *arguments, gpu=True):
    plugin = ["-p", "fake_gpu"] if gpu else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    path = root / "tests" / "gpu_record.json"
    return done.stdout + done.stderr, json.loads(path.read_text()) if path.exists() else None


@pytest.mark.slow
def test_hooks_write_the_record(checkout):
    output, found = run_pytest(checkout, "tests")
    assert found is not None, output
    statuses = {name: entry["status"] for name, entry in found["families"].items()}
    assert statuses == dict.fromkeys(record.FAMILIES, "passed"), output
    assert found["families"]["pairwise"]["tests"] == 2


@pytest.mark.slow
def test_hooks_record_failures_with_their_seed(checkout):
    path = checkout / "tests" / "gpu" / "service" / "test_x.py"
    path.write_text("def test_bad(seed):\n    assert seed is None\n")
    output, found = run_pytest(checkout, "tests/gpu")
    assert found["families"]["service"]["failed"] == ["tests/gpu/service/test_x.py::test_bad"]
    assert found["families"]["pairwise"]["status"] == "passed"
    assert "KERNLIB_SEED=" in output


PARTIAL = [("tests", "-k", "test_ok"), ("tests/gpu/families/pairwise/test_x.py::test_ok",)]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [*PARTIAL, ("--co", "tests")])
def test_hooks_record_no_partial_run(checkout, arguments):
    output, found = run_pytest(checkout, *arguments)
    assert found is None, output


@pytest.mark.slow
def test_hooks_record_no_run_whose_cases_are_of_no_suite(checkout):
    output, found = run_pytest(checkout, "tests", "--cases", "2")
    assert found is None, output
    assert "gpu record: service incomplete, not recorded" in output, output


@pytest.mark.slow
def test_hooks_leave_gpu_tests_out_without_a_gpu(checkout):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    output, found = run_pytest(checkout, "tests", "-m", "gpu", gpu=False)
    assert "tests/gpu needs an NVIDIA GPU" in output and found is None


# With pytest-xdist, whose workers hand what they saw to the process that writes.

needs_xdist = pytest.mark.skipif(
    importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed"
)
WORKERS = ("-p", "xdist", "-n", "2")
OUTCOMES = """
import pytest


@pytest.mark.parametrize("number", range(6))
def test_many(number):
    assert number != 4


def test_skipped():
    pytest.skip("here")


@pytest.fixture
def late():
    yield
    raise ValueError


def test_bad_end(late):
    pass
"""
CRASH = """
import os


def test_crash():
    os._exit(1)
"""


@pytest.mark.slow
@needs_xdist
def test_workers_write_the_record_of_one_process(checkout):
    (checkout / "tests" / "gpu" / "service" / "test_x.py").write_text(OUTCOMES)
    (checkout / "tests" / "gpu" / "service" / "test_y.py").write_text(GPU_TEST)
    output, wanted = run_pytest(checkout, "-n", "0", "--cases", "all", "tests")
    assert wanted is not None, output
    assert len(wanted["families"]["service"]["failed"]) == 2
    assert wanted["families"]["service"]["reason"] == "1 of 10 tests skipped"
    (checkout / "tests" / "gpu_record.json").unlink()
    output, found = run_pytest(checkout, *WORKERS, "--cases", "all", "tests")
    assert found == wanted and "gpu record: pairwise passed" in output, output


@pytest.mark.slow
@needs_xdist
@pytest.mark.parametrize("arguments", PARTIAL)
def test_workers_record_no_partial_run(checkout, arguments):
    output, found = run_pytest(checkout, *WORKERS, *arguments)
    assert found is None and "gpu record: pairwise incomplete, not recorded" in output, output


@pytest.mark.slow
@needs_xdist
def test_a_worker_that_crashed_leaves_all_incomplete(checkout):
    (checkout / "tests" / "gpu" / "service" / "test_x.py").write_text(CRASH)
    output, found = run_pytest(checkout, *WORKERS, "tests")
    assert found is None, output
    for family in record.FAMILIES:
        assert f"gpu record: {family} incomplete, not recorded" in output, output
