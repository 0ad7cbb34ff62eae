"""What an installation must hold, and how little `import kernlib` may do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import kernlib
from kernlib.jit import sources

PACKAGE = Path(kernlib.__file__).resolve().parent
IMPORTED_MODULES = 3  # of this package; each costs some 0.2 ms and more
UNWRITABLE_HOME = "/proc"  # not even root makes a folder there

IMPORT_AND_REPORT = """
import json, sys
import torch
files = []
def watch(event, arguments):
    if event in ("open", "os.mkdir"):
        files.append(str(arguments[0]))
sys.addaudithook(watch)
before = set(sys.modules)
import kernlib
opened = list(files)
cuda = torch.cuda.is_initialized()
new = sorted(set(sys.modules) - before)
print(json.dumps({"modules": new, "files": opened, "cuda": cuda}))
"""


def python(code: str, **variables: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter without anybody's cache settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KERNLIB_", "XDG_"))}
    command = [sys.executable, "-W", "always::RuntimeWarning", "-c", code]
    found = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found


@pytest.fixture(scope="module")
def imported() -> dict:
    """A report of importing kernlib after torch."""
    return json.loads(python(IMPORT_AND_REPORT).stdout)


def test_sources_are_there():
    assert (sources.root() / "common" / "types.cuh").is_file()
    assert (sources.root() / "pairwise/direct/direct.cuh").is_file()


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_the_version_is_that_of_the_installation():
    assert metadata.version("kernlib") == kernlib.__version__


def test_every_public_name_resolves():
    for name in dir(kernlib):
        assert getattr(kernlib, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kernlib.nothing  # noqa: B018


def test_import_is_quick(imported):
    assert len(imported["modules"]) <= IMPORTED_MODULES, imported["modules"]


def test_import_opens_only_its_own_source(imported):
    files = imported["files"]
    assert [f for f in files if not Path(f).resolve().is_relative_to(PACKAGE)] == []


def test_import_loads_nothing_else_and_touches_no_gpu(imported):
    assert {name.partition(".")[0] for name in imported["modules"]} == {"kernlib"}
    assert not imported["cuda"]


def test_import_alone_loads_no_torch():
    code = (
        "import sys; before = set(sys.modules)  # wheels of CUDA 12 leave cuda there\n"
        "import kernlib; print(sorted({'torch', 'cuda', 'lmdb'} & set(sys.modules) - before))"
    )
    assert python(code).stdout.strip() == "[]"


def test_import_and_cpu_tensors_leave_home_empty(tmp_path):
    code = (
        "import torch, kernlib as kl\n"
        "kl.run_kernel(kl.laplace_l1(), torch.ones(3, 2), torch.ones(4, 2), bandwidth=1.0)"
    )
    python(code, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert list(tmp_path.iterdir()) == []


def test_import_and_compile_with_a_home_that_cannot_be_written():
    code = (
        "import torch, kernlib as kl\n"
        "x = torch.empty(64, 8, device='meta')\n"
        "made = kl.compile(kl.laplace_l1(), specs=(x, x), bandwidth=1.0)\n"
        "made += kl.compile(kl.laplace_l1(), specs=(x, x), bandwidth=1.0)\n"
        "print(len(made), made[0].cubin == made[1].cubin)"
    )
    found = python(code, HOME=UNWRITABLE_HOME)
    assert found.stdout.split() == ["2", "True"]
    assert found.stderr.count("RuntimeWarning") == 1
    assert "KERNLIB_CACHE_DIR" in found.stderr


# The versions that are permitted.


def test_every_requirement_has_an_oldest_version_that_the_document_names():
    root = PACKAGE.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("kernlib is installed, without its checkout")
    said = subprocess.check_output([sys.executable, str(root / ".ci" / "floors.py")], text=True)
    floors = dict(line.split("==") for line in said.splitlines())
    text = (root / "pyproject.toml").read_text()
    required = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)[1]
    for name in re.findall(r'"([\w-]+)', required):
        assert name in floors, f"{name} has no lower bound"
    document = (root / "docs" / "versions.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|$", document, re.M))
    assert rows == floors
