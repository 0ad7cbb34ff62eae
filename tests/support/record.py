"""The GPU record: which files each entry's last GPU run covered, and how it went.

CI has no GPU, so ``tests/gpu_record.json`` says what passed on one, by which suite, when and on
what, and a CPU test compares digests. An entry covers what it alone can break: that of a family its
own kernels and lowering, "service" what makes and keeps kernels, "linalg" its folder, and "shared"
all other host code, which its small suite proves by a call of each operation.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from kernlib.jit import sources
from tests.support import meaning
from tests.support.paths import ROOT

COMMITTED = ROOT / "tests" / "gpu_record.json"
GPU_TESTS = ROOT / "tests" / "gpu"
RENEW = "run `pytest tests/gpu` on a machine with an NVIDIA GPU and commit tests/gpu_record.json"

# What belongs to an entry that is no family's: patterns below ROOT. To a family belong its package
# and its folder of kernel_sources; to "shared" all of the package that is no other's.
OWN = {
    "distributed": ("kernlib/distributed/**/*.py",),
    "linalg": ("kernlib/linalg/**/*.py",),
    "service": ("kernlib/jit/**/*.py",),
}
SHARED = "shared"


def record_path() -> Path:
    """Where a run writes: KERNLIB_GPU_RECORD, or the committed record."""
    return Path(os.environ.get("KERNLIB_GPU_RECORD") or COMMITTED)


def folders(root: Path = ROOT) -> dict[str, Path]:
    """Name of each entry of the record to the folder of its tests."""
    tests = root / "tests" / "gpu"
    found = [*(tests / "families").glob("*/__init__.py"), *tests.glob("*/__init__.py")]
    names = {path.parent.name: path.parent for path in found}
    names.pop("families", None)
    return dict(sorted(names.items()))


FAMILIES = tuple(folders())


def family_of(path: Path) -> str | None:
    """The entry whose GPU tests a file holds, by its folder."""
    if GPU_TESTS not in path.parents:
        return None
    first, *rest = path.relative_to(GPU_TESTS).parts
    name = rest[0] if first == "families" else first
    return name if name in FAMILIES else None


def tests_of(family: str) -> set[Path]:
    """The files of its GPU tests."""
    return set(folders()[family].rglob("test_*.py"))


def own_files(entry: str, root: Path = ROOT) -> set[str]:
    """Names, relative to ``root``, of the Python files of the package that belong to an entry."""
    if entry == SHARED:
        others = (own_files(name, root) for name in folders(root) if name != SHARED)
        return _files_below(root, "kernlib/**/*.py") - set().union(*others)
    return _files_below(root, *OWN.get(entry, (f"kernlib/families/{entry}/**/*.py",)))


def _files_below(root: Path, *patterns: str) -> set[str]:
    return {path.relative_to(root).as_posix() for p in patterns for path in root.glob(p)}


def files(entry: str, root: Path = ROOT) -> list[str]:
    """Names, relative to ``root``, of all files an entry's digest covers, sorted: those of the
    package that are its own, its GPU tests, and its device code."""
    folder = folders(root)[entry].relative_to(root)
    tests = _files_below(root, f"{folder}/**/*.py", "tests/gpu/*.py")
    python = own_files(entry, root)
    return sorted(python | tests | _device_code(entry, python, root))


_GENERATED = re.compile(r"\bcommon/\w+\.cuh\b")  # what generated code includes


def _device_code(entry: str, python: set[str], root: Path) -> set[str]:
    """Names of the CUDA files in a family's folder and of those that its Python or shared lowering
    names, with all that they include."""
    folder = sources.root() / entry
    names = {path.relative_to(sources.root()).as_posix() for path in folder.rglob("*.cuh")}
    lowering = _files_below(root, "kernlib/lowering/*.py")
    for name in python | lowering if names else ():
        names |= set(_GENERATED.findall((root / name).read_text()))
    closures = (sources.closure(f'#include "{name}"') for name in names)
    return {f"kernel_sources/{name}" for closure in closures for name in closure}


def digest(family: str, root: Path = ROOT) -> str:
    """sha256 over names and meanings of a family's files."""
    state = hashlib.sha256()
    for name in files(family, root):
        text = (root / name).read_text()
        code = (meaning.of_python if name.endswith(".py") else meaning.of_cuda)(text)
        state.update(f"{name}\0{len(code)}\0{code}".encode())
    return state.hexdigest()


# The record itself.


def read(path: Path = COMMITTED) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


MACHINE = ("date", "gpu", "driver", "torch", "nvrtc")
SUITES = {"few": "gpu", "many": "gpu_full", "all": "gpu_full"}  # by ``--cases``


def unverified(reason: str) -> dict:
    """The entry of a family that no GPU could be had for."""
    ran = dict.fromkeys(("suite", *MACHINE, "digest"), "")
    return {"status": "unverified", **ran, "files": [], "tests": 0, "failed": [],
            "reason": reason, "full": {}}  # fmt: skip


def write(results: dict[str, dict], machine: dict | None = None, path: Path | None = None) -> Path:
    """Put entries of families into the record, beside those of the families that did not run.

    ``machine`` names gpu, driver, torch, nvrtc and date; by default this one. ``full`` of an entry
    is the last time that all of its tests passed, of what digest.
    """
    path = path or record_path()
    if machine is None:
        from benchmarks.common.harness import machine as ask

        machine = ask()
    entries = {name: unverified("not run yet") for name in FAMILIES}
    entries |= {k: v for k, v in read(path).get("families", {}).items() if k in entries}
    for name, result in results.items():
        full = entries[name].get("full", {})
        entry = {**unverified(""), **result, **{field: machine[field] for field in MACHINE}}
        if entry["suite"] == "gpu_full" and entry["status"] == "passed":
            full = {field: entry[field] for field in ("date", "gpu", "digest", "tests")}
        entries[name] = {**entry, "full": full}
    path.write_text(json.dumps({"families": entries}, indent=1) + "\n")
    return path


def verdict(family: str, entry: dict | None, current: str) -> tuple[str, str]:
    """("ok" | "warn" | "fail", why) of a family's entry beside the digest of its files now."""
    status = entry["status"] if entry else "missing"
    if status == "unverified" and entry["reason"]:
        return "warn", f"{family} was never verified on a GPU: {entry['reason']}; {RENEW}"
    if status != "passed":
        failed = ", ".join(entry["failed"][:5]) if entry else ""
        return "fail", f"{family}: the last GPU run is {status} {failed}; {RENEW}"
    if entry["digest"] != current:
        return "fail", f"{family} has changed since its last GPU run; {RENEW}"
    return "ok", ""


@dataclass
class Run:
    """What one pytest session did with the GPU tests, in one process or merged from several.
    ``suite`` is "gpu", "gpu_full", or "" of a run whose cases are neither's."""

    suite: str = "gpu"
    digests: dict[str, str] = field(default_factory=dict)
    tests: dict[str, dict[str, str]] = field(default_factory=dict)  # family, test, outcome or ""
    files: set[Path] = field(default_factory=set)  # collected, if only to run none of their tests
    partial: set[str] = field(default_factory=set)

    def collected(self, family: str, path: Path, test: str) -> None:
        """A test that is going to run; the family's digest is taken before the first one does."""
        if family not in self.digests:
            self.digests[family] = digest(family)
        self.files.add(path)
        self.tests.setdefault(family, {})[test] = ""

    def outcome(self, family: str, test: str, outcome: str) -> None:
        """A phase of a test ended; failed outweighs skipped outweighs passed."""
        weight = ["", "passed", "skipped", "failed"].index
        tests = self.tests.setdefault(family, {})
        tests[test] = max(tests.get(test, ""), outcome, key=weight)

    def state(self) -> dict:
        """All of it as plain data, which another process can :meth:`merge`."""
        return {
            "digests": self.digests,
            "tests": self.tests,
            "files": sorted(map(str, self.files)),
            "partial": sorted(self.partial),
        }

    def merge(self, state: dict | None) -> None:
        """Add what another process did, the :meth:`state` of its run. A family is partial of which
        both read different files; each is where a process died and left None."""
        if state is None:
            self.partial |= set(FAMILIES)
            return
        for family, found in state["digests"].items():
            if self.digests.setdefault(family, found) != found:
                self.partial.add(family)
        for family, tests in state["tests"].items():
            for test, outcome in tests.items():
                self.outcome(family, test, outcome)
        self.files |= set(map(Path, state["files"]))
        self.partial |= set(state["partial"])

    def resume(self, path: Path) -> None:
        """Add what ``path`` keeps of earlier runs of the same code, and keep it all there: runs of
        some files each are one of all. Of a test that ran again the last outcome counts."""
        kept = json.loads(path.read_text()) if path.exists() else {}
        for family in self.tests.keys() - self.partial:
            own, earlier = self.tests[family], kept.get(family)
            same = {"digest": self.digests[family], "suite": self.suite}
            if earlier is not None and same.items() <= earlier.items():
                again = {test: outcome for test, outcome in own.items() if outcome}
                self.tests[family] = {**own, **earlier["tests"], **again}
                self.files |= {Path(os.path.normpath(ROOT / name)) for name in earlier["files"]}
            kept[family] = {
                **same,
                "tests": self.tests[family],
                "files": [os.path.relpath(name, ROOT) for name in tests_of(family) & self.files],
            }
        path.write_text(json.dumps(kept))

    def complete(self, family: str) -> bool:
        """Whether every test of the family was collected and ran."""
        if not self.suite or family in self.partial or not self.tests.get(family):
            return False
        return tests_of(family) <= self.files and all(self.tests[family].values())

    def results(self) -> dict[str, dict]:
        """The record's entries of the complete families."""
        return {family: self._entry(family) for family in self.tests if self.complete(family)}

    def _entry(self, family: str) -> dict:
        tests = self.tests[family]
        failed = sorted(test for test, outcome in tests.items() if outcome == "failed")
        skipped = sum(outcome == "skipped" for outcome in tests.values())
        ran = len(tests) - skipped
        status = "failed" if failed else "passed" if ran else "unverified"
        return {
            "status": status,
            "suite": self.suite,
            "digest": self.digests[family],
            "files": files(family),
            "tests": ran,
            "failed": failed,
            "reason": f"{skipped} of {len(tests)} tests skipped" if skipped else "",
        }
