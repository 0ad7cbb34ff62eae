"""The documents tell the truth: their commands, their code, their tables."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from datetime import date

import pytest
import torch

import kernlib
from benchmarks import report
from benchmarks.common import drawing
from benchmarks.report import picture, verdict
from kernlib import ahead, settings
from kernlib.descriptors import epilogues, expression, gates
from kernlib.families.kronecker_sparse import plans
from kernlib.families.kronecker_sparse.lowering import choose
from kernlib.families.kronecker_sparse.operation import PRODUCT
from kernlib.families.pairwise import stages
from kernlib.jit import targets
from kernlib.nn import KSLinear, compat
from kernlib.nn.kronecker_sparse import ALGOS
from tests.support.paths import ROOT

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
README, EPILOGUES = DOCUMENTS["README.md"], DOCUMENTS["docs/concepts/epilogues.md"]
PAIRWISE = DOCUMENTS["docs/families/pairwise.md"]
FACTORS = DOCUMENTS["docs/families/kronecker_sparse.md"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def first_cells(text: str, heading: str) -> list[str]:
    """The code names in the first column of the table whose first heading this is."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*?\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    rows = table[1].splitlines()
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def named(text: str, heading: str) -> set[str]:
    """The same without arguments and defaults."""
    return {re.split(r"[(=]", name)[0] for name in first_cells(text, heading)}


def public(module) -> set[str]:
    """Functions and classes that a module defines."""
    members = vars(module).items()
    return {
        name
        for name, value in members
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }


# README.


def test_it_opens_with_the_two_commands():
    run, develop = blocks(README, "bash")[:2]
    assert run.strip() == 'pip install ".[cu13]" && kernlib demo'
    assert develop.strip() == 'pip install -e ".[cu13,test]" && pytest'
    assert README.index(develop) < README.index("## ")


def test_it_is_short():
    assert len(README.splitlines()) <= 120


def test_the_table_of_variables_is_that_of_the_settings():
    running = DOCUMENTS["docs/concepts/running.md"]
    assert first_cells(running, "variable") == [variable.name for variable in settings.VARIABLES]


def test_every_target_is_listed():
    platforms = README[README.index("## Platforms") :]
    for arch in targets.SHARED_BYTES:
        assert re.search(rf"\b{arch.removeprefix('sm_')}\b", platforms.replace("sm_", "")), arch


def test_its_results_are_those_that_are_committed():
    assert re.search(r"<!-- results:begin -->\n.*<!-- results:end -->\n", README, re.S)
    assert report.main(["--check"]) == 0, "run python -m benchmarks.report"
    assert picture.main(["--check"]) == 0


def test_every_page_of_results_is_of_results_that_are_committed():
    pages = {ROOT / verdict.page(family) for family, _ in report.load(drawing.RESULTS)}
    assert {*(ROOT / "docs" / "results").glob("*.md")} == pages


def test_pages_of_surprises_lead_to_every_finding_and_page_of_behaviour():
    page = "".join(DOCUMENTS[f"docs/concepts/surprises{of}.md"] for of in ("", "_of_peers"))
    findings, behaviour = (ROOT / "findings").glob("*.sh"), ROOT / "docs/results/behaviour"
    assert [path.name for path in findings if f"findings/{path.name}" not in page] == []
    modules = {path.stem for path in (ROOT / "benchmarks/behaviour").glob("*.py")}
    for path in behaviour.glob("*.md"):
        assert path.stem in modules and f"](../results/behaviour/{path.name})" in page, path


def test_the_start_page_leads_to_every_document_and_example():
    """Pages of the gallery and of the reference by the first of each, those of behaviour by that of
    surprises."""
    assert "](docs/index.md)" in README
    folder = ROOT / "docs"
    for path in {*folder.rglob("*.md"), *(ROOT / "examples").glob("*.py")} - {folder / "index.md"}:
        if path.parent.name in ("gallery", "reference"):
            path = path.parent / "index.md"
        if path.parent.name == "behaviour":
            path = folder / "concepts" / "surprises.md"
        name = path.relative_to(folder if folder in path.parents else ROOT).as_posix()
        assert name in DOCUMENTS["docs/index.md"], path


# The changelog.


def test_versions_are_dated_the_newest_first():
    headings = re.findall(r"^## (.+)$", DOCUMENTS["CHANGELOG.md"], re.M)
    assert headings.pop(0) == "Unreleased"
    dated = [re.fullmatch(r"(\d+\.\d+\.\d+) - (20\d\d-\d\d-\d\d)", each) for each in headings]
    assert all(dated) and dated[0][1] == kernlib.__version__
    numbers = [tuple(map(int, each[1].split("."))) for each in dated]
    assert numbers == sorted(set(numbers), reverse=True)
    days = [date.fromisoformat(each[2]) for each in dated]
    assert days == sorted(days, reverse=True)


def test_changes_are_of_the_kinds_that_a_changelog_has():
    kinds = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    for section in re.split(r"^## ", DOCUMENTS["CHANGELOG.md"], flags=re.M)[1:]:
        found = re.findall(r"^### (.+)$", section, re.M)
        assert found == [kind for kind in kinds if kind in found], section[:20]


# Tables of names.


def test_every_named_descriptor_and_stage_is_listed():
    home = "kernlib.families.pairwise.descriptor"
    values = {name: getattr(kernlib, name) for name in dir(kernlib)}
    defined = {n for n, value in values.items() if getattr(value, "__module__", None) == home}
    assert named(PAIRWISE, "name") == defined - {"Pairwise"}
    assert named(PAIRWISE, "stage") == {cls.__name__ for cls in (*stages.INNER, *stages.OUTER)}


def test_every_epilogue_and_function_is_listed():
    homes = {epilogues.__name__, gates.__name__}
    leaves = [cls for cls in _leaves(epilogues.Epilogue) if cls.__module__ in homes]
    assert named(EPILOGUES, "epilogue") == {cls.__name__ for cls in leaves}
    assert f"`{' '.join(sorted(expression.FUNCTIONS))}`" in EPILOGUES


def test_defaults_of_epilogues_are_theirs():
    for cell in first_cells(EPILOGUES, "epilogue"):
        name, given = re.fullmatch(r"(\w+)\((.*)\)", cell).groups()
        kind = getattr(kernlib, name)
        for argument, value in re.findall(r"(\w+)=([^,]+)", given):
            assert inspect.signature(kind).parameters[argument].default == ast.literal_eval(
                value
            ), cell


def test_every_field_of_a_factor_is_listed():
    fields = inspect.signature(kernlib.KroneckerSparse).parameters
    assert first_cells(FACTORS, "field of `KroneckerSparse`") == _written(fields)


def test_every_argument_and_algorithm_of_a_layer_is_listed():
    arguments = dict(inspect.signature(KSLinear).parameters)
    del arguments["more"]  # what is refused, or KSMM's place of the device
    assert first_cells(FACTORS, "argument") == _written(arguments)
    assert [cell.strip('"') for cell in first_cells(FACTORS, "algo")] == list(ALGOS)


def test_every_function_of_ksmm_is_listed():
    assert named(FACTORS, "function") == public(compat)


def test_every_public_name_is_in_a_document():
    text = "".join(DOCUMENTS.values())
    public_names = {*dir(kernlib), *kernlib.nn.__all__} - {"__version__"}
    assert not [name for name in public_names if not re.search(rf"\b{name}\b", text)]


# Statements that code can check.


def kinds(pattern: tuple, batch: int, batch_last: bool, dtype: torch.dtype) -> list[str]:
    """The kinds of kernels of sm_90a that serve a product of contiguous tensors."""
    made = kernlib.KroneckerSparse(*pattern, batch_last=batch_last)
    shape = (made.in_features, batch) if batch_last else (batch, made.in_features)
    x, weight = (torch.empty(size, dtype=dtype, device="meta") for size in (shape, pattern))
    return [spec.description.split()[1] for spec in ahead.specs(made, "sm_90a", (x, weight), {})]


def kind(*product) -> str:
    """The one that multiplies, behind one that may have packed the weight."""
    return kinds(*product)[-1]


def takers(pattern: tuple, batch: int, dtype: torch.dtype) -> set[str]:
    """The kinds that take such a product batch first, of which the fastest serves it."""
    made = kernlib.KroneckerSparse(*pattern)
    x = torch.empty(batch, made.in_features, dtype=dtype, device="meta")
    weight = torch.empty(pattern, dtype=dtype, device="meta")
    call = PRODUCT.check(made, (x, weight), None, {})
    problem, *_ = plans.problem_of(made, call, x, weight, None)
    return {choice["kind"] for choice in choose.candidates(problem, "sm_90a")}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_kernels_serve_what_the_table_says(dtype):
    whole = 16 // dtype.itemsize
    for batch in (1000, 1001, 1002, 1004):
        wanted = "portable" if batch % whole else "hopper"
        for pattern in ((2, 3, 5, 4), (6, 64, 64, 1), (1, 7, 9, 3)):
            assert kind(pattern, batch, True, dtype) == wanted, (pattern, batch)
    for b, c in ((64, 64), (60, 64), (64, 60), (66, 64), (64, 66)):
        wanted = "portable" if b % whole or c % whole else "hopper"
        assert kind((2, b, c, 1), 1000, False, dtype) == wanted, (b, c)
    for d in range(2, 34):
        taken = d in ((2, 3, 4, 8) if whole == 8 else (2, 4)) or d % whole == 0
        wanted = {"interleaved"} if taken else set()
        assert takers((2, 48, 40, d), 1000, dtype) == {"transposed", "portable"} | wanted, d
        for few in (((2, 48, 40, d), 1), ((2, 48, 1, d), 9)):
            assert "transposed" not in takers(*few, dtype), few
    for c in (5, 6, 8):  # of which d = 2 makes 10, 12 and 16 features
        wanted = set() if 2 * c % whole else {"interleaved"}
        assert takers((2, 24, c, 2), 1000, dtype) == {"transposed", "portable"} | wanted, c
    small, large = (kind((3, 97, 41, 13), batch, False, dtype) for batch in (2, 5000))
    assert (small, large) == ("portable", "hopper")


def test_a_product_of_few_long_rows_is_summed_as_a_gradient_is():
    assert "gradient" in kinds((1, 64, 4096, 1), 8, False, torch.float16)
    assert "gradient" not in kinds((1, 64, 1024, 1), 8, False, torch.float16)


# All of them.


@pytest.mark.slow
@pytest.mark.few(1000)
@pytest.mark.parametrize("name", [name for name, text in DOCUMENTS.items() if "```python" in text])
def test_its_code_runs(name, tmp_path):
    code = "\n".join(blocks(DOCUMENTS[name], "python"))
    environment = {**os.environ, "KERNLIB_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_named_files_exist(name):
    text = DOCUMENTS[name]
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    paths = re.findall(r"`((?:kernlib|kernel_sources|docs|examples|benchmarks)/[\w/.]+)`", text)
    for path in (*((ROOT / name).parent / link for link in links), *(ROOT / p for p in paths)):
        if not re.search(r"/f(/|\.\w+$|$)", str(path)):  # f stands for a new family
            assert path.exists(), path


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_headings(name):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", DOCUMENTS[name]):
        target = ((ROOT / name).parent / link).resolve() if link else ROOT / name
        titles = re.findall(r"^#+ (.*)", target.read_text(), re.M)
        assert anchor in {_anchor(title) for title in titles}, anchor


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_lines_are_short_but_for_tables(name):
    wide = [x for x in DOCUMENTS[name].splitlines() if len(x) > 100 and not x.startswith("|")]
    assert not [line for line in wide if not line.startswith("**")]  # heads of generated tables


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _written(parameters) -> list[str]:
    """Arguments as the first column of a table has them."""
    required = inspect.Parameter.empty
    return [
        name if p.default is required else f"{name}={p.default!r}".replace("'", '"')
        for name, p in parameters.items()
    ]


def _leaves(cls: type) -> list[type]:
    below = cls.__subclasses__()
    return [leaf for sub in below for leaf in _leaves(sub)] if below else [cls]
