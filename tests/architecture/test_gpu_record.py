"""The committed GPU record is of this tree, and what makes it stale is what it should be."""

import json
import shutil
import warnings

import pytest
import torch

from tests.architecture.package import MODULES
from tests.support import record

MACHINE = {"gpu": "G", "driver": "1", "torch": "2", "nvrtc": "13", "date": "2026-01-01"}
LOWERING = [p.relative_to(record.ROOT) for p in (record.ROOT / "kernlib/lowering").glob("*.py")]


def test_record_is_current(request):
    here = {record.family_of(item.path) for item in request.session.items}
    entries, faults = record.read()["families"], []
    for family in record.FAMILIES:
        if torch.cuda.is_available() and family in here:
            continue  # this run renews the record
        outcome, why = record.verdict(family, entries.get(family), record.digest(family))
        if outcome == "warn":
            warnings.warn(why, stacklevel=1)
        faults += [why] if outcome == "fail" else []
    assert not faults, "\n".join(faults)


def test_record_has_the_schema():
    entries = record.read()["families"]
    assert set(entries) == set(record.FAMILIES)
    for held in entries.values():
        assert held.keys() == record.unverified("").keys()
        assert held["status"] in ("passed", "failed", "unverified")
        assert held["suite"] in ("gpu", "gpu_full", "")


def test_every_file_of_the_package_is_of_one_entry():
    covered = [name for entry in record.FAMILIES for name in record.own_files(entry)]
    modules = {path.relative_to(record.ROOT).as_posix() for path in MODULES}
    assert sorted(covered) == sorted(modules)


def test_a_family_covers_its_kernels_and_its_tests():
    pairwise, service, shared = map(record.files, ("pairwise", "service", "shared"))
    assert "kernlib/jit/store.py" in service and "kernlib/runtime/plan.py" in shared
    assert "kernlib/families/pairwise/kernels/direct.py" in pairwise
    assert "tests/gpu/families/pairwise/test_values.py" in pairwise
    folder = (record.ROOT / "kernel_sources" / "pairwise").rglob("*.cuh")
    own = {path.relative_to(record.ROOT).as_posix() for path in folder}
    assert {*own, "kernel_sources/common/math.cuh"} <= set(pairwise)
    assert not [name for name in (*service, *shared) if name.endswith(".cuh")]


@pytest.fixture
def tree(tmp_path):
    for name in (*record.files("pairwise"), *map(str, LOWERING)):
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
    ran = {"status": "passed", "suite": "gpu", "digest": "d", "tests": 1}
    return {**record.unverified(""), **ran, **fields}


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
    assert found["suite"] == "gpu"
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
    other = full_run(gpu_files)
    other.suite = ""
    assert other.results() == {}


def test_a_file_without_a_case_in_this_suite_is_complete(gpu_files):
    run = full_run(gpu_files[:1])
    run.files.add(gpu_files[1])
    assert run.results()["pairwise"]["tests"] == 1


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
    record.write({"service": entry(status="failed")}, {**MACHINE, "kernlib": "1", "gpu": "H"})
    held = record.read(path)["families"]
    assert held["pairwise"] == entry(**MACHINE)
    assert (held["service"]["status"], held["service"]["gpu"]) == ("failed", "H")
    assert held["sparse"]["status"] == "unverified"


def test_the_last_full_run_is_kept(tmp_path):
    path = tmp_path / "record.json"
    record.write({"pairwise": entry(suite="gpu_full", digest="one", tests=9)}, MACHINE, path)
    later = {**MACHINE, "date": "2026-02-02"}
    record.write({"pairwise": entry(digest="two")}, later, path)
    held = record.read(path)["families"]["pairwise"]
    assert (held["suite"], held["digest"], held["date"]) == ("gpu", "two", "2026-02-02")
    assert held["full"] == {"date": "2026-01-01", "gpu": "G", "digest": "one", "tests": 9}
