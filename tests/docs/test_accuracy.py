"""docs/concepts/accuracy.md names what computes, the tests that hold it, and says of what torch is
asked."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import kernlib
from kernlib import linalg
from kernlib.nn.kronecker_sparse import ALGOS
from tests.support import hostile
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "concepts" / "accuracy.md").read_text()
CODE = " ".join(re.findall(r"`([^`\n]+)`", PAGE))
# What computes nothing by itself: it describes a part of a call, prepares one, or is an error.
OTHERS = {"register_operators", "Pairwise"}
PARTS = {
    "kernlib.families.pairwise.stages", "kernlib.descriptors.epilogues",
    "kernlib.descriptors.gates", "kernlib.errors",
}  # fmt: skip
MODULES = {
    "blocksparse",
    "checkpoints",
    "compat",
    "descriptors",
    "distributed",
    "events",
    "settings",
    "linalg",
    "nn",
    "sparse",
    "__version__",
}


def is_named(name: str) -> bool:
    return re.search(rf"\b{name}\b", CODE) is not None


def test_every_operation_is_named():
    assert set(kernlib.__all__) >= MODULES
    homes = {name: getattr(kernlib, name).__module__ for name in set(kernlib.__all__) - MODULES}
    names = {name for name, home in homes.items() if home not in PARTS} - OTHERS
    assert not [name for name in sorted(names) if not is_named(name)]
    assert is_named("Custom")


def test_every_solver_is_named():
    functions = [n for n in linalg.__all__ if inspect.isfunction(getattr(linalg, n))]
    assert "eigh" in functions
    assert not [name for name in functions if not is_named(name)]


def test_what_the_page_says_of_modules_exists():
    for name in re.findall(r"`(linalg|sparse)\.(\w+)`", PAGE):
        assert hasattr(getattr(kernlib, name[0]), name[1])
    for algo in set(ALGOS) - {"auto", "kernel"}:
        assert f'"{algo}"' in PAGE


def test_the_bars_are_those_of_the_tests():
    for dtype, name in ((torch.float32, "float32"), (torch.float64, "float64")):
        row = re.search(rf"^\| {name} \| (\S+) \| (\S+) \|$", PAGE, re.M).groups()
        assert tuple(map(float, row)) == (hostile.FORWARD[dtype], hostile.GRADIENT[dtype])
    for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
        assert hostile.FORWARD[dtype] == hostile.GRADIENT[dtype] == 2.0**-bits + 1e-6
        assert f"2^-{bits} + 1e-6" in PAGE


def test_the_tests_that_hold_it_exist():
    named = re.findall(r"`(tests/[\w./]+)`", PAGE)
    assert len(named) > 5
    assert not [path for path in named if not (ROOT / path).exists()]


def test_infinities_and_duplicates_are_what_the_table_says():
    inf, nan = torch.inf, torch.nan
    a = torch.tensor([[0.0, 1.0], [inf, 1.0], [nan, 1.0]])
    for make, p in (("l1_distance", 1.0), ("l2_distance", 2.0), ("p_distance", 1.3)):
        numbers = {"p": p} if make == "p_distance" else {}
        found = kernlib.run_kernel(getattr(kernlib, make)(), a, a[:2], **numbers)
        assert found[0].tolist() == [0.0, inf] and found[1, 0] == inf
        assert found[1, 1].isnan() and found[2].isnan().all()
    for make in ("gaussian", "cauchy", "laplace_l1", "laplace_l2"):
        found = kernlib.run_kernel(getattr(kernlib, make)(), a, a[:2], bandwidth=2.0)
        assert found[0].tolist() == [1.0, 0.0] and found[2].isnan().all()
    for make in ("matern32", "matern52"):
        found = kernlib.run_kernel(getattr(kernlib, make)(), a, a[:2], bandwidth=2.0)
        assert found[0, 0] == 1.0 and found[0, 1].isnan()
    assert kernlib.cdist(a[2:], a[:1], p=inf).isnan().all()
    assert kernlib.kernel_argmin(kernlib.l1_distance(), a[:1], a).tolist() == [2]
    values = kernlib.kernel_topk(kernlib.l1_distance(), a[:1], a, 3)[0]
    assert values[0, :2].tolist() == [0.0, inf] and values[0, 2].isnan()


def test_without_points_there_is_nothing_to_choose_from():
    a, none = torch.zeros(2, 3), torch.zeros(0, 3)
    assert kernlib.kernel_sum(kernlib.l1_distance(), a, none).tolist() == [0.0, 0.0]
    assert kernlib.kernel_logsumexp(kernlib.l1_distance(), a, none).tolist() == [-torch.inf] * 2
    with pytest.raises(ValueError):
        kernlib.kernel_min(kernlib.l1_distance(), a, none)
