"""Who may import whom: arrows point one way, and what is slow or optional is imported late."""

import ast
import subprocess
import sys
from functools import cache

from tests.architecture.package import FAMILIES, MODULES, PACKAGE
from tests.support import imports as reader
from tests.support.paths import ROOT

OPERATIONS = tuple(f"kernlib.families.{name}.operation" for name in FAMILIES)
ABOVE = (
    *("kernlib.nn", "kernlib.checkpoints", "kernlib.cli", "kernlib.compat", "kernlib.ahead"),
    "kernlib.tuner",
)
LAUNCHING = (
    "devices",
    "driver",
    "plan",
)  # of the runtime: for kernels of any family

# Part of the package to what it must not import, by the first words of the module's name.
FORBIDDEN = {
    "descriptors": ("torch", "cuda", "lmdb", "kernlib.families", "kernlib.runtime", "kernlib.jit"),
    "jit": ("torch", "kernlib.families", "kernlib.descriptors", "kernlib.lowering",
            "kernlib.runtime", "kernlib.run"),
    "lowering": ("torch", "cuda", "lmdb", "kernlib.families", "kernlib.runtime", "kernlib.run",
                 *ABOVE),
    "runtime": ("lmdb", "kernlib.families", "kernlib.run", *ABOVE),
    **{f"runtime/{name}.py": ("kernlib.descriptors",) for name in LAUNCHING},
    "families": ("cuda", "lmdb", *ABOVE),
    **{
        f"families/{one}": tuple(f"kernlib.families.{other}" for other in FAMILIES if other != one)
        for one in FAMILIES
    },
    "linalg": ("lmdb", "kernlib.nn", "kernlib.checkpoints", "kernlib.cli", "kernlib.compat",
               "kernlib.ahead"),
    "checkpoints": ("cuda", "lmdb", "kernlib.linalg", "kernlib.jit", "kernlib.cli",
                    "kernlib.compat", "kernlib.ahead", "kernlib.tuner"),
    "ahead.py": ("cuda", "lmdb", *OPERATIONS, "kernlib.cli"),
    "tuner.py": ("cuda", "lmdb", *OPERATIONS, "kernlib.cli"),
    "progress.py": ("torch", "cuda", "lmdb", "kernlib"),
    "settings.py": ("torch", "cuda", "lmdb", "kernlib"),
    "canonical.py": ("torch", "cuda", "lmdb", "kernlib"),
    "debug.py": ("cuda", "lmdb", "kernlib.families", "kernlib.jit", "kernlib.run", *ABOVE),
    "sharding.py": ("cuda", "lmdb", "kernlib"),
    "hints": ("torch", "cuda", "lmdb", "kernlib.families", "kernlib.runtime", "kernlib.jit"),
    "hints/spelling.py": ("torch", "cuda", "lmdb", "kernlib"),
    "errors.py": ("torch", "cuda", "lmdb", "kernlib"),
    "events.py": ("torch", "cuda", "lmdb", "kernlib.families", "kernlib.runtime", "kernlib.jit"),
}  # fmt: skip
# What may be imported only inside a function: the rest of the package works without it.
LAZY = {
    **{"cuda": PACKAGE, "platformdirs": PACKAGE, "safetensors": PACKAGE},
    "torch": PACKAGE / "__init__.py",
}


@cache
def imports(path, late=True):
    """Modules that a file imports, inside of functions too or not, each `from x import y` as x.y
    as well."""
    tree = ast.parse(path.read_text())
    return reader.modules(tree, path.relative_to(ROOT).parent.parts, late=late)


def within(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def files_of(part):
    path = PACKAGE / part
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def test_arrows_point_one_way():
    assert all(map(files_of, FORBIDDEN))
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for part, prefixes in FORBIDDEN.items()
        for path in files_of(part)
        for name in imports(path)
        for prefix in prefixes
        if within(name, prefix)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_no_import_goes_in_a_circle():
    """Those inside of functions count: one that comes back says that a wall stands wrongly."""
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    known = {name.removesuffix(".__init__"): path for name, path in known.items()}

    def imported(name):
        """Packages around a module are there before it."""
        return [x for x in imports(known[name]) if x in known and not within(name, x)]

    arrows = {name: imported(name) for name in known}
    while arrows:  # of which those go that import nothing that is left
        left = {name: [x for x in found if x in arrows] for name, found in arrows.items()}
        arrows = {name: found for name, found in left.items() if found}
        assert len(arrows) < len(left), sorted(arrows)


def test_lowering_works_without_torch():
    """Every module of it, and what it imports."""
    folders = [PACKAGE / "families" / name for name in FAMILIES]
    parts = [PACKAGE / "lowering"]
    parts += [part for one in folders for part in (one / "lowering", one / "kernels")]
    names = [
        ".".join(("kernlib", *path.relative_to(PACKAGE).with_suffix("").parts))
        for part in parts
        for path in sorted(part.rglob("*.py"))
    ]
    code = "import importlib, sys\nsys.modules['torch'] = None\n"
    code += f"for name in {names}: importlib.import_module(name)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_what_is_optional_or_slow_is_imported_when_it_is_used():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for name, place in LAZY.items()
        for path in MODULES
        if place in (path, *path.parents)
        and any(within(one, name) for one in imports(path, late=False))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_of_the_package_imports_tests_or_benchmarks():
    known = {"kernlib", "torch", "cuda", "lmdb", "numpy", "platformdirs", "click", "rich"}
    known |= {"nvmath"}  # an extra, for kernlib.linalg
    known |= {"safetensors"}  # for kernlib.checkpoints, which says how to install it
    known |= {"typing_extensions"}  # which torch requires, and type checkers alone import
    for path in MODULES:
        roots = {name.split(".")[0] for name in imports(path)}
        assert roots <= known | set(sys.stdlib_module_names), path


def test_tests_of_a_family_are_its_own():
    """No test of a family imports another's."""
    for family in FAMILIES:
        others = tuple(f"tests.families.{name}" for name in FAMILIES if name != family)
        for folder in ("tests", "tests/gpu"):
            for path in (ROOT / folder / "families" / family).rglob("*.py"):
                assert not [x for x in imports(path) for other in others if within(x, other)], path


def test_what_tests_share_knows_none_of_them():
    """``tests/support`` serves families and the contract, and imports neither."""
    for path in (ROOT / "tests" / "support").rglob("*.py"):
        above = ("tests.families", "tests.contract")
        assert not [x for x in imports(path) for one in above if within(x, one)], path


def test_the_reader_of_imports_sees_every_form():
    text = (
        "import torch.nn as t\nfrom kernlib import jit\nfrom . import y\nfrom ..jit import spec\n"
        "def f():\n    import cuda\nif TYPE_CHECKING:\n    import lmdb\n"
    )
    found = reader.modules(ast.parse(text), ("kernlib", "part"))
    assert {"torch.nn", "kernlib.jit", "kernlib.part.y", "kernlib.jit.spec", "cuda"} <= found
    assert "lmdb" not in found
    assert "cuda" not in reader.modules(ast.parse(text), ("kernlib", "part"), late=False)
