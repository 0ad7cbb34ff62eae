"""What an installation must hold, and how little `import kernlib` may do."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import types
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import kernlib
from kernlib.jit import sources
from tests.support.paths import ROOT

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


@pytest.fixture
def root() -> Path:
    """The checkout, or an unpacked sdist."""
    if not (PACKAGE.parent / "pyproject.toml").exists():
        pytest.skip("kernlib is installed, without its checkout")
    return PACKAGE.parent


@pytest.fixture
def project(root) -> dict:
    """The table of that name in pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def test_every_requirement_has_an_oldest_version_that_the_document_names(root):
    said = subprocess.check_output([sys.executable, str(root / ".ci" / "floors.py")], text=True)
    floors = dict(line.split("==") for line in said.splitlines())
    text = (root / "pyproject.toml").read_text()
    required = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)[1]
    for name in re.findall(r'"([\w-]+)', required):
        assert name in floors, f"{name} has no lower bound"
    document = (root / "docs" / "versions.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|$", document, re.M))
    assert rows == floors


def test_each_cuda_brings_everything(project):
    extras = project["optional-dependencies"]
    (solvers,) = extras["linalg"]
    for major in ("12", "13"):
        names = " ".join(extras[f"cu{major}"])
        assert solvers in extras[f"cu{major}"] and f"cuda-core[cu{major}]" in names
        # Its own extras bring a CUDA newer than torch's, beside which pip passes over torch's.
        assert "nvmath-python[" not in names
        assert all(wheel in names for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime"))
    # The index has torch for CUDA 12 up to 2.10, which pins bindings that cu13 refuses.
    assert "torch<2.11" in extras["cu12"] and "torch>=2.10" in extras["cu13"]


def test_it_says_which_pythons_are_tried_and_no_address_that_is_not(project, root):
    document = (root / "docs" / "versions.md").read_text()
    tried = set(re.findall(r"3\.\d+", re.search(r"^\| Python \|.*", document, re.M)[0]))
    start = "Programming Language :: Python :: 3."
    said = {each.removeprefix(start[:-2]) for each in project["classifiers"] if start in each}
    assert said == tried
    assert "urls" not in project


# What an archive holds.


@pytest.fixture
def contents(root) -> dict:
    """The names of the script that compares archives with the checkout."""
    return runpy.run_path(str(root / ".ci" / "contents.py"))


def test_an_archive_that_lacks_or_adds_is_found(contents, tmp_path):
    wanted = contents["wanted_wheel"]()
    assert "kernlib/kernel_sources/common/types.cuh" in wanted and "kernlib/py.typed" in wanted
    assert not [name for name in wanted if name.startswith(("tests", "benchmarks", "docs"))]
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**wanted, "tests/test_it.py": b"", "kernlib/py.typed": b"1"}.items():
            if name != "kernlib/kernel_sources/common/types.cuh":
                archive.writestr(name, content)
        archive.writestr("kernlib-9.dist-info/METADATA", "Name: kernlib\nVersion: 9\n\nNothing.")
    faults = contents["faults_of_wheel"](path)
    assert {
        "lacks kernlib/kernel_sources/common/types.cuh",
        "holds tests/test_it.py",
        "has another kernlib/py.typed",
        "is version 9",
        "lacks or adds RECORD of its dist-info",
        "its extra cu13 lacks nvmath-python",
        "describes itself by another text than README.md",
    } <= set(faults)


def test_the_sdist_has_what_tests_and_documents_need(contents):
    wanted = contents["wanted_sdist"]()
    names = ("tests/conftest.py", "docs/versions.md", "examples/quickstart.py", ".ci/floors.py",
             "findings/README.md", "benchmarks/behaviour/page.py")  # fmt: skip
    assert all(name in wanted for name in (*names, "pyproject.toml", "CHANGELOG.md"))


def test_a_description_elsewhere_has_no_broken_links(monkeypatch):
    """Words alone while the repository has no address, whole links behind one."""
    interface = types.ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    description = runpy.run_path(str(ROOT / "hatch_build.py"))["description"]
    text = "![a plot](b/c.svg) [a page](docs/d.md#e), [a site](https://f.org)"
    assert description(text, None) == " a page, [a site](https://f.org)"
    assert description(text, "https://g.org/tree/") == (
        "![a plot](https://g.org/tree/b/c.svg) [a page](https://g.org/tree/docs/d.md#e), "
        "[a site](https://f.org)"
    )
    readme = (ROOT / "README.md").read_text()
    assert "](docs/" in readme and "](docs/" not in description(readme, None)
