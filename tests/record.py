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
from pathlib import Path

from kernlib.jit import sources

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "tests" / "gpu_record.json"
GPU_TESTS = ROOT / "tests" / "gpu"
RENEW = "run `pytest tests/gpu` on a machine with an NVIDIA GPU and commit tests/gpu_record.json"

# Of each family: patterns of files below ROOT, and patterns of CUDA files, below kernel_sources,
# that belong to it with all that they include.
LOWERING = "kernlib/lowering/*.py"
SHARED = tuple(
    f"kernlib/runtime/{name}.py"
    for name in ("expressions", "numbers", "precision", "sequence", "tensors")
)
PRODUCTS = tuple(f"kernlib/runtime/{name}.py" for name in ("arguments", "autograd"))
FAMILIES = {
    "pairwise": (
        (
            "kernlib/families/pairwise/**/*.py",
            LOWERING,
            *SHARED,
            "tests/gpu/test_pairwise*.py",
            "tests/gpu/pairwise_*.py",  # what those tests share
            "tests/gpu/sanitized_calls.py",
            "tests/pairwise_*.py",
            "tests/reduction_hostile.py",
        ),
        ("pairwise/**/*.cuh",),
    ),
    "kronecker_sparse": (
        (
            "kernlib/families/kronecker_sparse/**/*.py",
            LOWERING,
            *SHARED,
            *PRODUCTS,
            "kernlib/runtime/tensor_map.py",
            "kernlib/nn/activations.py",
            "kernlib/nn/compat.py",
            "kernlib/nn/derived.py",
            "kernlib/nn/kronecker_sparse*.py",
            "kernlib/nn/replace.py",
            "tests/gpu/test_kronecker_sparse*.py",
            "tests/gpu/kronecker_sparse_*.py",
            "tests/product_hostile.py",
        ),
        # math.cuh is included by what lowering generates.
        ("kronecker_sparse/**/*.cuh", "common/math.cuh"),
    ),
    "sparse": (
        (
            "kernlib/families/sparse/**/*.py",
            LOWERING,
            *SHARED,
            *PRODUCTS,
            "kernlib/nn/activations.py",
            "kernlib/nn/sparse*.py",
            "kernlib/sparse/*.py",
            "kernlib/compat/macko/*.py",
            "tests/gpu/test_sparse*.py",
            "tests/gpu/sparse_*.py",
            "tests/sparse_*_cases.py",
            "tests/product_hostile.py",
        ),
        ("sparse/**/*.cuh", "common/math.cuh"),
    ),
    "linalg": (
        ("kernlib/linalg/*.py", "tests/gpu/test_linalg*.py", "tests/linalg_*.py"),
        (),
    ),
    "service": (
        (
            "kernlib/jit/*.py",
            "kernlib/forks.py",
            "kernlib/run.py",
            "kernlib/ahead.py",
            "kernlib/tuner.py",
            "kernlib/runtime/launch.py",
            "kernlib/runtime/candidates.py",
            "tests/gpu/test_service*.py",
        ),
        (),
    ),
}


def record_path() -> Path:
    """Where a run writes: KERNLIB_GPU_RECORD, or the committed record."""
    return Path(os.environ.get("KERNLIB_GPU_RECORD") or COMMITTED)


def family_of(path: Path) -> str | None:
    """The family whose GPU tests a file holds: its name begins with ``test_<family>``."""
    if GPU_TESTS not in path.parents:
        return None
    return next((name for name in FAMILIES if path.name.startswith(f"test_{name}")), None)


def files(family: str, root: Path = ROOT) -> list[str]:
    """Names, relative to ``root``, of all files a family's digest covers, sorted."""
    patterns, entries = FAMILIES[family]
    found = {path.relative_to(root).as_posix() for p in patterns for path in root.glob(p)}
    folder = sources.root()
    for path in (path for entry in entries for path in folder.glob(entry)):
        closure = sources.closure(f'#include "{path.relative_to(folder).as_posix()}"')
        found |= {f"kernel_sources/{name}" for name in closure}
    return sorted(found)


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

    def complete(self, family: str) -> bool:
        """Whether every test of the family was collected and ran."""
        if family in self.partial or not self.tests.get(family):
            return False
        wanted = {path for path in GPU_TESTS.glob(f"test_{family}*.py")}
        return wanted <= self.files and all(self.tests[family].values())

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
