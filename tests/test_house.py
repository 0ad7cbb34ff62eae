"""The rules of the house: who may import whom, and how long files and lines may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kernlib"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted((ROOT / "kernel_sources").rglob("*.cu*"))
FILES = [
    *MODULES,
    *SOURCES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]
LONGEST_FILE, WIDEST_LINE = 600, 100
MOST_MODULES = 20  # of a package

FAMILIES = sorted(path.parent.name for path in (PACKAGE / "families").glob("*/__init__.py"))
OPERATIONS = tuple(f"kernlib.families.{name}.operation" for name in FAMILIES)
ABOVE = ("kernlib.nn", "kernlib.cli", "kernlib.compat", "kernlib.ahead", "kernlib.tuner")
# Where pickles of kernlib 0.1 look.
FORMER = {PACKAGE / f"descriptors/{name}.py" for name in (*FAMILIES, "norms")}

# Part of the package to what it must not import, by the first words of the module's name.
FORBIDDEN = {
    "descriptors": ("torch", "cuda", "lmdb", "kernlib.families", "kernlib.runtime", "kernlib.jit"),
    "jit": ("torch", "kernlib.families", "kernlib.descriptors", "kernlib.lowering",
            "kernlib.runtime", "kernlib.run"),
    "lowering": ("torch", "cuda", "lmdb", "kernlib.families", "kernlib.runtime", "kernlib.run",
                 *ABOVE),
    "runtime": ("lmdb", "kernlib.families", "kernlib.run", *ABOVE),
    "runtime/launch.py": ("kernlib.descriptors",),
    "families": ("cuda", "lmdb", *ABOVE),
    **{
        f"families/{one}": tuple(f"kernlib.families.{other}" for other in FAMILIES if other != one)
        for one in FAMILIES
    },
    "linalg": ("lmdb", "kernlib.nn", "kernlib.cli", "kernlib.compat", "kernlib.ahead"),
    "ahead.py": ("cuda", "lmdb", *OPERATIONS, "kernlib.cli"),
    "tuner.py": ("cuda", "lmdb", *OPERATIONS, "kernlib.cli"),
    "progress.py": ("torch", "cuda", "lmdb", "kernlib"),
    "settings.py": ("torch", "cuda", "lmdb", "kernlib"),
    "canonical.py": ("torch", "cuda", "lmdb", "kernlib"),
    "errors.py": ("torch", "cuda", "lmdb", "kernlib"),
    "events.py": ("torch", "cuda", "lmdb", "kernlib.families", "kernlib.runtime", "kernlib.jit"),
}  # fmt: skip
# What may be imported only inside a function: the rest of the package works without it.
LAZY = {"cuda": PACKAGE, "platformdirs": PACKAGE, "torch": PACKAGE / "__init__.py"}


def nodes(path, whole=True):
    """The statements of a file: all of them, or those that run when it is imported."""
    waiting = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        yield node
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if whole or not inside:
            waiting += ast.iter_child_nodes(node)


def imports(path, whole=True):
    """Names of modules that a file imports, each `from x import y` as x.y as well."""
    package = ["kernlib", *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in nodes(path, whole):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def within(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def files_of(part):
    path = PACKAGE / part
    return [path] if path.is_file() else sorted({*path.rglob("*.py")} - FORMER)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_arrows_point_one_way(part):
    assert files_of(part)
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files_of(part)
        for name in imports(path)
        for prefix in FORBIDDEN[part]
        if within(name, prefix)
    }
    assert not wrong


def test_lowering_works_without_torch():
    """Every module of it, and what it imports."""
    parts = [PACKAGE / "lowering", *sorted((PACKAGE / "families").glob("*/lowering"))]
    names = [
        ".".join(("kernlib", *path.relative_to(PACKAGE).with_suffix("").parts))
        for part in parts
        for path in sorted(part.glob("*.py"))
    ]
    code = "import importlib, sys\nsys.modules['torch'] = None\n"
    code += f"for name in {names}: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_packages_are_small():
    for folder in {path.parent for path in MODULES}:
        found = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(found) <= MOST_MODULES, folder


def test_device_code_and_its_lowering_share_a_stem():
    """A folder of kernel_sources/<family> has its entry, and a module of the family's lowering."""
    folders = [path for path in (ROOT / "kernel_sources").glob("*/*") if path.is_dir()]
    assert folders
    for folder in folders:
        lowering = PACKAGE / "families" / folder.parent.name / "lowering"
        assert (folder / f"{folder.name}.cuh").is_file(), folder
        assert (lowering / f"{folder.name}.py").is_file(), folder


def test_what_would_share_a_prefix_is_a_folder():
    """In families, but for what a CPU and a GPU do of one thing."""
    for folder in {path.parent for path in MODULES if PACKAGE / "families" in path.parents}:
        stems = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        names = {stem.removesuffix("_cpu").removesuffix("_gpu") for stem in stems}
        for prefix in {name.split("_")[0] for name in names}:
            same = [name for name in names if name.split("_")[0] == prefix]
            assert len(same) < 3, (folder, same)


@pytest.mark.parametrize("name", LAZY)
def test_what_is_optional_or_slow_is_imported_when_it_is_used(name):
    wrong = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if LAZY[name] in (path, *path.parents)
        and any(within(found, name) for found in imports(path, whole=False))
    ]
    assert not wrong


def test_no_module_of_the_package_imports_tests_or_benchmarks():
    known = {"kernlib", "torch", "cuda", "lmdb", "numpy", "platformdirs", "click", "rich"}
    known |= {"nvmath"}  # an extra, for kernlib.linalg
    known |= {"typing_extensions"}  # which torch requires, and type checkers alone import
    for path in MODULES:
        roots = {name.split(".")[0] for name in imports(path)}
        assert roots <= known | set(sys.stdlib_module_names), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_lines_are_short(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= LONGEST_FILE
    wide = [f"{i}: {len(x)}" for i, x in enumerate(lines, 1) if len(x) > WIDEST_LINE]
    assert not wide


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_reader_of_imports_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "part").mkdir()
    path = tmp_path / "part" / "x.py"
    path.write_text(
        "import torch.nn as t\nfrom kernlib import jit\nfrom . import y\nfrom ..jit import spec\n"
        "def f():\n    import cuda\n"
    )
    expected = {"torch.nn", "kernlib.jit", "kernlib.part.y", "kernlib.jit.spec", "cuda"}
    assert expected <= imports(path)
    assert "cuda" not in imports(path, whole=False)


# Functions of torch that make a tensor of nothing that lies on a device: unless told, they follow
# torch.set_default_device, `with torch.device(...)` and torch.set_default_dtype.
FACTORIES = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty",
    "empty_permuted", "empty_strided", "eye", "fft.fftfreq", "fft.rfftfreq", "full",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace",
    "nested.as_nested_tensor", "nested.nested_tensor", "normal", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor",
    "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def unplaced(source):
    """Calls of torch's factories that do not say where, or of what dtype, the tensor is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            said = {keyword.arg for keyword in node.keywords}
            known = name.startswith("torch.") and name.removeprefix("torch.") in FACTORIES
            if known and not said >= {"device", "dtype"}:
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_new_tensors_say_their_device_and_dtype(path):
    """So that what a caller has set as a default never decides of temporaries."""
    assert not list(unplaced(path.read_text()))


def test_the_reader_of_factories_sees_what_is_not_said():
    assert list(unplaced("torch.zeros(3, device=d)")) == ["1: torch.zeros(3, device=d)"]
    assert list(unplaced("x = f(torch.arange(3, dtype=torch.int64))"))
    assert not list(unplaced("torch.zeros(3, device=d, dtype=t); x.new_zeros(3); torch.sum(x)"))
