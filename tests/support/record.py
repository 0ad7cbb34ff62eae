"""The GPU record: which files a family's last GPU run covered, and how it went.

CI has no GPU, so ``tests/gpu_record.json`` says what passed on one and a CPU test compares digests.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kernlib.jit import sources
from tests.support import imports
from tests.support.paths import ROOT

COMMITTED = ROOT / "tests" / "gpu_record.json"
GPU_TESTS = ROOT / "tests" / "gpu"
RENEW = "run `pytest tests/gpu` on a machine with an NVIDIA GPU and commit tests/gpu_record.json"

# What belongs to an entry that is no family's: patterns below ROOT. To a family belong its package
# and its folder of kernel_sources.
RUNTIME = ("candidates", "devices", "driver", "nvtx", "plan")
OWN = {
    "linalg": ("kernlib/linalg/**/*.py",),
    "service": (
        "kernlib/[!_]*.py",
        "kernlib/jit/**/*.py",
        *(f"kernlib/runtime/{name}.py" for name in RUNTIME),
    ),
}
LAZY = (
    *("kernlib/__init__.py", "kernlib/nn/__init__.py"),
    *("kernlib/sparse/__init__.py", "kernlib/blocksparse/__init__.py"),
    "kernlib/compat/__init__.py",
)


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


def own_files(family: str, root: Path = ROOT) -> set[str]:
    """Names, relative to ``root``, of the Python files that belong to a family and to no other."""
    patterns = OWN.get(family, (f"kernlib/families/{family}/**/*.py",))
    return {path.relative_to(root).as_posix() for p in patterns for path in root.glob(p)}


def files(family: str, root: Path = ROOT) -> list[str]:
    """Names, relative to ``root``, of all files a family's digest covers, sorted: its own, its GPU
    tests, and what these import, however far, that belongs to no other family."""
    tests = {path.relative_to(root).as_posix() for path in folders(root)[family].rglob("*.py")}
    others = [own_files(name, root) for name in folders(root) if name != family]
    left_out = set().union(LAZY, *others)
    python = imports.closure(own_files(family, root) | tests, root, left_out, LAZY)
    return sorted(python | _device_code(family, python, root))


_GENERATED = re.compile(r"\bcommon/\w+\.cuh\b")  # what generated code includes


def _device_code(family: str, python: set[str], root: Path) -> set[str]:
    """Names of the CUDA files in a family's folder and of those that its Python names, with all
    that they include."""
    folder = sources.root() / family
    names = {path.relative_to(sources.root()).as_posix() for path in folder.rglob("*.cuh")}
    for name in python if names else ():
        names |= set(_GENERATED.findall((root / name).read_text()))
    closures = (sources.closure(f'#include "{name}"') for name in names)
    return {f"kernel_sources/{name}" for closure in closures for name in closure}


def digest(family: str, root: Path = ROOT) -> str:
    """sha256 over names and contents of a family's files; comments and blank lines do not count."""
    state = hashlib.sha256()
    for name in files(family, root):
        text = (root / name).read_text()
        code = (strip_python if name.endswith(".py") else strip_cuda)(text)
        state.update(f"{name}\0{len(code)}\0{code}".encode())
    return state.hexdigest()


# What does not count. Positions are cut from the text itself, because a dump of tokens or of the
# tree differs between versions of Python.


@cache  # a run asks of each file once for every family
def strip_python(text: str) -> str:
    """Source without comments, docstrings, blank lines and trailing space."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for (first, start), (last, end) in sorted(_docstrings(text) | _comments(text), reverse=True):
        head, tail = lines[first - 1][:start], lines[last - 1][end:]
        lines[first - 1 : last] = [head + tail]
    kept = (line.decode().rstrip() for line in lines)
    return "\n".join(line for line in kept if line)


def _docstrings(text: str) -> set:
    """Spans ((line, byte), (line, byte)) of docstrings."""
    homes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, homes) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            found.add(((doc.lineno, doc.col_offset), (doc.end_lineno, doc.end_col_offset)))
    return found


def _comments(text: str) -> set:
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            start = len(token.line[: token.start[1]].encode())
            row = token.start[0]
            found.add(((row, start), (row, start + len(token.string.encode()))))
    return found


_LITERAL_OR_COMMENT = re.compile(
    r'(?P<literal>"(?:\\.|[^"\\\n])*"|\'(?:\\.[^\'\n]*|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/', re.S
)
_CUDA_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.[^\'\n]*|[^\'\\\n])\'|\w+|<<=|>>=|\.\.\.|->|\+\+|--|<<|>>'
    r"|[<>=!]=|&&|\|\||[-+*/%&|^]=|::|\S"
)


@cache
def strip_cuda(text: str) -> str:
    """Source as tokens, without comments; only the ends of directives keep their lines."""
    text = text.replace("\\\n", " ")
    text = _LITERAL_OR_COMMENT.sub(lambda found: found["literal"] or " ", text)
    return "".join(_cuda_line(line) for line in text.splitlines() if line.strip())


def _cuda_line(line: str) -> str:
    if line.lstrip().startswith("#"):  # F(x) and F (x) differ here: only runs of space do not count
        return "\n" + " ".join(line.split()) + "\n"
    return "".join(f"{token} " for token in _CUDA_TOKEN.findall(line))


# The record itself.


def read(path: Path = COMMITTED) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def unverified(reason: str) -> dict:
    """The entry of a family that no GPU could be had for."""
    return {"status": "unverified", "digest": "", "files": [], "tests": 0, "failed": [],
            "reason": reason}  # fmt: skip


def write(results: dict[str, dict], machine: dict | None = None, path: Path | None = None) -> Path:
    """Put entries of families into the record, beside those of the families that did not run.

    ``machine`` names gpu, driver, torch, nvrtc and date; by default this one.
    """
    path = path or record_path()
    if machine is None:
        from benchmarks.common.harness import machine as ask

        machine = ask()
    head = {name: machine[name] for name in ("gpu", "driver", "torch", "nvrtc", "date")}
    families = {name: unverified("not run yet") for name in FAMILIES}
    families |= {**read(path).get("families", {}), **results}
    path.write_text(json.dumps({**head, "families": families}, indent=1) + "\n")
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
    """What one pytest session did with the GPU tests, in one process or merged from several."""

    digests: dict[str, str] = field(default_factory=dict)
    tests: dict[str, dict[str, str]] = field(default_factory=dict)  # family, test, outcome or ""
    files: set[Path] = field(default_factory=set)
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
            if earlier is not None and earlier["digest"] == self.digests[family]:
                again = {test: outcome for test, outcome in own.items() if outcome}
                self.tests[family] = {**own, **earlier["tests"], **again}
                self.files |= {Path(os.path.normpath(ROOT / name)) for name in earlier["files"]}
            kept[family] = {
                "digest": self.digests[family],
                "tests": self.tests[family],
                "files": [os.path.relpath(name, ROOT) for name in tests_of(family) & self.files],
            }
        path.write_text(json.dumps(kept))

    def complete(self, family: str) -> bool:
        """Whether every test of the family was collected and ran."""
        if family in self.partial or not self.tests.get(family):
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
            "digest": self.digests[family],
            "files": files(family),
            "tests": ran,
            "failed": failed,
            "reason": f"{skipped} of {len(tests)} tests skipped" if skipped else "",
        }
