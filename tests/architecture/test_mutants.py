"""The faults of tests/mutants can be put into this tree, and the map finds the tests for them."""

import ast

import pytest

from tests.mutants.reach import Map
from tests.support.paths import ROOT

faults = pytest.importorskip("tests.mutants.faults")  # tomllib came with Python 3.11


def test_every_fault_can_be_put_in():
    """Its text stands once in its file, and Python's is Python with it."""
    mutants = faults.load()
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.kind in ("fixed", "drawn") and mutant.before != mutant.after, mutant.id
        assert mutant.lines(), mutant.id
        if not mutant.on_device:
            text = (ROOT / mutant.file).read_text()
            ast.parse(text.replace(mutant.before, mutant.after))


def test_a_fault_is_applied_and_taken_back(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("x = 1\ny = 2\n")
    mutant = faults.Mutant("a", "b", "a.py", "drawn", "", "y = 2\n", "y = 3\n")
    assert mutant.lines(tmp_path) == range(2, 3)
    before = mutant.apply(tmp_path)
    assert path.read_text() == "x = 1\ny = 3\n" and before == "x = 1\ny = 2\n"
    with pytest.raises(ValueError, match="stands 0 times"):
        mutant.apply(tmp_path)


def test_the_map_names_tests_by_line_and_by_header(tmp_path):
    lines = {"kernlib/a.py": {1: set(), 2: {"t::one"}, 3: {"t::one", "t::two"}}}
    seconds = {"t::one": 2.0, "t::two": 1.0}
    Map(lines, {"common/a.cuh": {"t::two"}}, seconds).write(tmp_path / "map")
    held = Map.read(tmp_path / "map")
    assert held.reaching("kernlib/a.py", range(3, 4)) == ["t::two", "t::one"]
    assert held.reaching("kernlib/a.py", range(2, 3)) == ["t::one", "t::two"]
    assert held.reaching("kernel_sources/common/a.cuh", range(9, 10)) == ["t::two"]
    assert held.reaching("kernlib/other.py", range(1, 2)) == []
