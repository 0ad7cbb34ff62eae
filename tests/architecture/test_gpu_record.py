"""The committed GPU record is of this tree, and what makes it stale is what it should be."""

import importlib.util
import json
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from tests.support import imports, record
from tests.support.limits import LIMIT_S

MACHINE = {"gpu": "G", "driver": "1", "torch": "2", "nvrtc": "13", "date": "2026-01-01"}
FIELDS = {"status", "digest", "files", "tests", "failed", "reason"}


@pytest.mark.parametrize("family", record.FAMILIES)
def test_record_is_current(family, request):
    here = {record.family_of(item.path) for item in request.session.items}
    if torch.cuda.is_available() and family in here:
        pytest.skip("this run renews the record")
    entry = record.read()["families"].get(family)
    outcome, why = record.verdict(family, entry, record.digest(family))
    if outcome == "warn":
        warnings.warn(why, stacklevel=1)
    assert outcome != "fail", why


def test_record_has_the_schema():
    found = record.read()
    assert set(found) == {*MACHINE, "families"}
    assert set(found["families"]) == set(record.FAMILIES)
    for entry in found["families"].values():
        assert set(entry) == FIELDS
        assert entry["status"] in ("passed", "failed", "unverified")


def test_families_cover_their_files():
    pairwise, service = record.files("pairwise"), record.files("service")
    assert "kernel_sources/pairwise/direct/direct.cuh" in pairwise
    assert "kernel_sources/common/math.cuh" in pairwise
    assert "kernlib/families/pairwise/lowering/direct.py" in pairwise
    assert {"kernlib/runtime/plan.py", "kernlib/jit/store.py"} <= set(service)
    found = (record.ROOT / "kernel_sources" / "pairwise").rglob("*.cuh")
    assert {path.relative_to(record.ROOT).as_posix() for path in found} <= set(pairwise)
    assert all((record.ROOT / name).is_file() for name in (*pairwise, *service))


def test_families_cover_what_their_tests_import():
    """By way of packages that load names late too, and nothing that another family's entry has."""
    pairwise, sparse = record.files("pairwise"), record.files("sparse")
    shared = {
        "kernlib/runtime/sequence.py",
        "kernlib/lowering/steps.py",
        "tests/support/hostile.py",
    }
    assert shared <= set(pairwise) & set(sparse)
    assert {"kernlib/nn/sparse_linear.py", "kernlib/compat/macko/product.py"} <= set(sparse)
    assert "kernlib/nn/kronecker_sparse.py" in record.files("kronecker_sparse")
    assert not [
        name for name in pairwise if name.startswith(("kernlib/families/sparse", "kernlib/jit"))
    ]


def test_the_reader_of_imports_sees_what_is_loaded_late(tmp_path):
    texts = {
        "kernlib/__init__.py": "_NAMES = {'kernlib.a': ('late',), 'kernlib.b': ('other',)}",
        "kernlib/a.py": "def f():\n    from . import c",
        "kernlib/b.py": "",
        "kernlib/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kernlib.b",
        "tests/t.py": "import kernlib as kl\nkl.late(1)",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lazy = ("kernlib/__init__.py",)
    found = imports.closure(["tests/t.py"], tmp_path, lazy, lazy)
    assert found == {"tests/t.py", "kernlib/a.py", "kernlib/c.py"}
    found = imports.closure(["tests/t.py"], tmp_path, ("kernlib/a.py", *lazy), lazy)
    assert found == {"tests/t.py"}


# What counts as a change.

PYTHON = '''"""Doc."""
import os  # why


class A:
    """One."""

    x = "# kept"  # café


def f(a):
    """Two
    lines."""
    return f"{a} # kept"
'''


def test_python_comments_and_docstrings_do_not_count():
    bare = 'import os\nclass A:\n    x = "# kept"\ndef f(a):\n    return f"{a} # kept"'
    assert record.strip_python(PYTHON) == bare
    assert record.strip_python(bare) == bare


def test_python_keeps_text_behind_other_alphabets():
    assert record.strip_python('x = "é" ; y = 1  # z\n') == 'x = "é" ; y = 1'
    assert record.strip_python('def f(): "doc"; return 1\n') == "def f(): ; return 1"


@pytest.mark.parametrize(
    "other",
    [
        "int  f( int a ){ return a+1; }",
        "int f(int a) {\n\n  return a + 1;  // one more\n}\n",
        "/* a\n b */ int f(int a) { return /* x */ a + 1; }",
    ],
)
def test_cuda_comments_and_space_do_not_count(other):
    assert record.strip_cuda(other) == record.strip_cuda("int f(int a) { return a + 1; }")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("int a;", "inta;"),
        ("a + +b", "a ++b"),
        ('"a // b"', '"a"'),
        ("#define F(x) x", "#define F (x) x"),
        ("#define A 1\nB", "#define A 1 B"),
        ("x = '\"'; // y", "x = '\"'; y"),
    ],
)
def test_cuda_changes_count(one, two):
    assert record.strip_cuda(one) != record.strip_cuda(two)


@pytest.fixture
def tree(tmp_path):
    for name in (*record.files("pairwise"), *record.LAZY):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(record.ROOT / name, tmp_path / name)
    return tmp_path


def test_digest_follows_code_only(tree):
    before = record.digest("pairwise", tree)
    assert before == record.digest("pairwise")
    source = tree / "kernel_sources/pairwise/terms.cuh"
    op = tree / "kernlib/families/pairwise/operation.py"
    source.write_text("// new\n" + source.read_text())
    op.write_text(op.read_text() + "\n# new\n")
    assert record.digest("pairwise", tree) == before
    op.write_text(op.read_text() + "\nNEW = 1\n")
    assert record.digest("pairwise", tree) != before
    source.write_text(source.read_text() + "\nint added;\n")
    assert record.digest("pairwise", tree) != before


# Verdicts, runs and the file.


def entry(**fields):
    base = {"status": "passed", "digest": "d", "files": [], "tests": 1, "failed": [], "reason": ""}
    return {**base, **fields}


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (entry(), "ok"),
        (entry(digest="old"), "fail"),
        (entry(status="failed", failed=["t"]), "fail"),
        (entry(status="unverified", reason="no GPU"), "warn"),
        (entry(status="unverified"), "fail"),
        (None, "fail"),
    ],
)
def test_verdict(found, outcome):
    got, why = record.verdict("pairwise", found, "d")
    assert got == outcome
    assert outcome == "ok" or ("pairwise" in why and "pytest tests/gpu" in why)


@pytest.fixture
def gpu_files(tmp_path, monkeypatch):
    names = ("test_a.py", "test_b.py")
    monkeypatch.setattr(record, "tests_of", lambda family: {tmp_path / name for name in names})
    for name in names:
        (tmp_path / name).touch()
    return [tmp_path / name for name in names]


def full_run(paths):
    run = record.Run()
    for path in paths:
        run.collected("pairwise", path, f"{path.name}::t")
        run.outcome("pairwise", f"{path.name}::t", "passed")
    return run


def test_complete_run_is_recorded(gpu_files):
    found = full_run(gpu_files).results()["pairwise"]
    assert set(found) == FIELDS
    assert (found["status"], found["tests"], found["failed"]) == ("passed", 2, [])
    assert found["digest"] == record.digest("pairwise") and found["reason"] == ""


def test_partial_runs_are_not_recorded(gpu_files):
    assert full_run(gpu_files[:1]).results() == {}
    deselected = full_run(gpu_files)
    deselected.partial.add("pairwise")
    assert deselected.results() == {}
    stopped = full_run(gpu_files)
    stopped.collected("pairwise", gpu_files[0], "never ran")
    assert stopped.results() == {}


def test_failures_and_skips_are_recorded(gpu_files):
    run = full_run(gpu_files)
    run.outcome("pairwise", "test_a.py::t", "skipped")
    assert run.results()["pairwise"]["tests"] == 1
    assert run.results()["pairwise"]["reason"] == "1 of 2 tests skipped"
    run.outcome("pairwise", "test_a.py::t", "failed")
    run.outcome("pairwise", "test_a.py::t", "passed")
    found = run.results()["pairwise"]
    assert (found["status"], found["failed"]) == ("failed", ["test_a.py::t"])


def test_all_skipped_verifies_nothing(gpu_files):
    run = full_run(gpu_files)
    for path in gpu_files:
        run.outcome("pairwise", f"{path.name}::t", "skipped")
    assert run.results()["pairwise"]["status"] == "unverified"


def told(run):
    """What a worker hands to the controller."""
    return json.loads(json.dumps(run.state()))


def workers_runs(paths):
    """Runs of workers that all collected every test and ran one file each."""
    runs = []
    for own in paths:
        run = record.Run()
        for path in paths:
            run.collected("pairwise", path, f"{path.name}::t")
        run.outcome("pairwise", f"{own.name}::t", "passed")
        runs.append(run)
    return runs


def merged(*states):
    run = record.Run()
    for state in states:
        run.merge(state)
    return run


def test_runs_of_workers_merge_into_that_of_one_process(gpu_files):
    states = [told(run) for run in workers_runs(gpu_files)]
    assert merged(*states) == merged(*reversed(states)) == full_run(gpu_files)
    assert merged(*states).results() == full_run(gpu_files).results()
    failing = workers_runs(gpu_files)
    failing[0].outcome("pairwise", "test_a.py::t", "failed")
    found = merged(*map(told, failing)).results()["pairwise"]
    assert (found["status"], found["failed"]) == ("failed", ["test_a.py::t"])


def test_what_workers_leave_open_is_not_recorded(gpu_files):
    first, second = workers_runs(gpu_files)
    assert merged(told(first)).results() == {}  # nobody ran the second file
    assert merged(told(first), told(second), None).results() == {}  # one has crashed
    second.partial.add("pairwise")
    assert merged(told(first), told(second)).results() == {}
    first, second = workers_runs(gpu_files)
    second.digests["pairwise"] = "other"
    assert merged(told(first), told(second)).results() == {}


def test_runs_of_some_files_each_are_one_of_all(gpu_files, tmp_path):
    """The last outcome of a test counts, and nothing of a run of other code, or of some tests."""
    kept = tmp_path / "runs.json"
    first, second = (full_run([path]) for path in gpu_files)
    first.outcome("pairwise", "test_a.py::t", "failed")
    first.resume(kept)
    assert first.results() == {}
    second.resume(kept)
    assert second.results()["pairwise"]["failed"] == ["test_a.py::t"]
    again = full_run(gpu_files[:1])
    again.resume(kept)
    assert again.results() == full_run(gpu_files).results()
    partial = full_run(gpu_files[:1])
    partial.partial.add("pairwise")
    partial.resume(kept)
    assert partial.results() == {}
    other = full_run(gpu_files[1:])
    other.digests["pairwise"] = "other"
    other.resume(kept)
    assert other.results() == {}
    again = full_run(gpu_files[:1])
    again.resume(kept)
    assert again.results() == {}


def test_write_keeps_other_families(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    monkeypatch.setenv("KERNLIB_GPU_RECORD", str(path))
    assert record.write({"pairwise": entry()}, MACHINE) == path
    record.write({"service": entry(status="failed")}, {**MACHINE, "kernlib": "1"})
    found = json.loads(path.read_text())
    assert found["families"]["pairwise"] == entry()
    assert found["families"]["service"]["status"] == "failed"
    assert set(found) == {*MACHINE, "families"}


# The hooks, in a session of their own with a torch that says it has a GPU.

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
                 "support/record", "support/imports", "support/speeds"):  # fmt: skip
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
def test_hooks_record_no_family_of_which_some_cases_are_left_out(checkout):
    (checkout / "tests" / "gpu" / "service" / "test_x.py").write_text(OUTCOMES)
    output, found = run_pytest(checkout, "tests", "--cases", "2")
    assert "gpu record: service incomplete, not recorded" in output, output
    assert "4 tests are further cases of tests" in output, output
    assert found["families"]["service"]["status"] == "unverified"
    assert found["families"]["pairwise"]["status"] == "passed"


def test_hooks_leave_gpu_tests_out_without_a_gpu(checkout):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    output, found = run_pytest(checkout, "tests", "-m", "gpu", gpu=False)
    assert f"{2 * len(record.FAMILIES)} tests need an NVIDIA GPU" in output and found is None


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
    output, wanted = run_pytest(checkout, "-n", "0", "tests")
    assert wanted is not None, output
    assert len(wanted["families"]["service"]["failed"]) == 2
    assert wanted["families"]["service"]["reason"] == "1 of 10 tests skipped"
    (checkout / "tests" / "gpu_record.json").unlink()
    output, found = run_pytest(checkout, *WORKERS, "tests")
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
