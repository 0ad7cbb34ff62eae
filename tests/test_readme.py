"""The README tells the truth: its commands, its code, its table of settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernlib
from kernlib import settings
from kernlib.descriptors import epilogues, expression
from kernlib.jit import targets

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/cache.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def first_cells(heading: str) -> list[str]:
    """The code names in the first column of the table whose first heading this is."""
    table = re.search(rf"^\| {heading} \|.*?\n\|[-|]+\n((?:\|.*\n)+)", README, re.M)
    rows = table[1].splitlines()
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_it_opens_with_the_two_commands():
    run, develop = blocks("bash")[:2]
    assert run.strip() == 'pip install ".[cu13]" && kernlib demo'
    assert develop.strip() == 'pip install -e ".[cu13,test]" && pytest'
    assert README.index(develop) < README.index("## ")


def test_it_is_short():
    generated = re.search(r"<!-- results:begin -->.*<!-- results:end -->", README, re.S)[0]
    assert len(README.replace(generated, "").splitlines()) < 150


def test_the_table_of_variables_is_that_of_the_settings():
    assert first_cells("variable") == [variable.name for variable in settings.VARIABLES]


def test_every_named_descriptor_is_listed():
    listed = {name.partition("(")[0] for name in first_cells("name")}
    home = kernlib._HOMES
    named = {n for n, where in home.items() if where == "kernlib.descriptors.pairwise"}
    assert listed == named - {"Pairwise"}


def test_every_epilogue_and_function_is_listed():
    listed = {name.partition("(")[0] for name in first_cells("epilogue")}
    leaves = [cls for cls in _leaves(epilogues.Epilogue) if cls.__module__ == epilogues.__name__]
    assert listed == {cls.__name__ for cls in leaves}
    assert " ".join(sorted(expression.FUNCTIONS)) in README


def test_every_target_is_listed():
    platforms = README[README.index("## Platforms") :]
    for arch in targets.SHARED_BYTES:
        assert re.search(rf"\b{arch.removeprefix('sm_')}\b", platforms.replace("sm_", "")), arch


def test_results_have_their_place():
    assert re.search(r"<!-- results:begin -->\n.*<!-- results:end -->\n", README, re.S)


def test_its_code_runs(tmp_path):
    code = "\n".join(blocks("python"))
    environment = {**os.environ, "KERNLIB_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_named_files_exist(name):
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`((?:kernlib|kernel_sources|docs|examples)/[\w/.]+)`", text)
    for path in (*links, *paths):
        if not re.search(r"/f(/|\.py|$)", path):  # f stands for a new family
            assert (ROOT / path).exists(), path


def _leaves(cls: type) -> list[type]:
    below = cls.__subclasses__()
    return [leaf for sub in below for leaf in _leaves(sub)] if below else [cls]
