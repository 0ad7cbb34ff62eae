"""How long files and lines may be, how many modules a package has, and where a name is a folder."""

import ast

from tests.architecture.package import MODULES, PACKAGE
from tests.support.paths import ROOT

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


def test_packages_are_small():
    for folder in {path.parent for path in MODULES}:
        found = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(found) <= MOST_MODULES, folder


def test_device_code_and_its_lowering_share_a_stem():
    """A folder of kernel_sources/<family> has its entry, and a module of the family's lowering or,
    in whatever package, of its kernels; or that is a package, and the folder has those of its
    kernels. Or a package of the family has kernels, and the folder of its name a file of each."""
    left = [
        (path, [PACKAGE / "families" / path.parent.name / part for part in ("kernels", "lowering")])
        for path in (ROOT / "kernel_sources").glob("*/*")
        if path.is_dir()
    ]
    assert left
    while left:
        folder, parts = left.pop()
        kernels = PACKAGE / "families" / folder.parent.name / folder.name / "kernels"
        if kernels.is_dir():  # a package of the family has kernels: each is a file here
            stems = {module.stem for module in kernels.glob("*.py")} - {"__init__"}
            assert stems <= {file.stem for file in folder.glob("*.cuh")}, folder
            continue
        packages = [part / folder.name for part in parts if (part / folder.name).is_dir()]
        inner = [path for path in folder.iterdir() if path.is_dir()]
        if packages:
            left += [(each, packages) for each in inner]
            continue
        assert not inner and (folder / f"{folder.name}.cuh").is_file(), folder
        assert any(any(part.rglob(f"{folder.name}.py")) for part in parts), folder


def test_what_would_share_a_prefix_is_a_folder():
    """In families, but for what a CPU and a GPU do of one thing."""
    for folder in {path.parent for path in MODULES if PACKAGE / "families" in path.parents}:
        stems = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        names = {stem.removesuffix("_cpu").removesuffix("_gpu") for stem in stems}
        for prefix in {name.split("_")[0] for name in names}:
            same = [name for name in names if name.split("_")[0] == prefix]
            assert len(same) < 3, (folder, same)


def test_files_and_lines_are_short():
    faults = []
    for path in FILES:
        lines = path.read_text().splitlines()
        wide = [str(i) for i, line in enumerate(lines, 1) if len(line) > WIDEST_LINE]
        if wide or len(lines) > LONGEST_FILE:
            faults.append(f"{path.relative_to(ROOT)}: {len(lines)} lines, too wide {wide}")
    assert not faults, "\n".join(faults)


def test_every_module_says_what_it_is():
    silent = [path for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent
