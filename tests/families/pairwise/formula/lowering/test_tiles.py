"""Matrices and reductions of any number of features, by the text of their kernels on the host."""

import pytest
import torch

from kernlib.families.pairwise.formula.kernels.tile import Tile
from kernlib.families.pairwise.formula.lowering import choose
from kernlib.lowering.kernel import Gpu
from tests.families.pairwise.formula.lowering.cases import (
    COL,
    FEATURE,
    PROCESSORS,
    ROW,
    Case,
    normal,
    points,
    positive,
)

SCALED = "exp(-sum((x - y) ** 2) / (s * t) / 40) * w"
GPU = Gpu("sm_90a", PROCESSORS)


def by_tiles(case):
    """The launches of a problem that the kernel of few features takes too."""
    return Tile().launch(None, case.problem(), GPU, {})


SIZES = [(1, 1, 1), (3, 65, 2), (129, 67, 33), (64, 128, 16)]


@pytest.mark.few(len(SIZES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("rows", "cols", "features"), SIZES)
def test_matrices(emulator, rows, cols, features, dtype):
    result = "float64" if dtype == "float64" else "float32"
    tensors = points(rows, cols, features, dtype, 2)
    Case(SCALED, tensors, "matrix", result=result).check(emulator)


@pytest.mark.parametrize("reduction", ["sum", "logsumexp", "min"])
@pytest.mark.parametrize("result", ["float32", "float64"])
def test_reductions(emulator, reduction, result):
    tensors = points(70, 333, 85, result, 2)
    Case("-sum(abs(x - y)) / s / 20 + w * t", tensors, reduction, result=result).check(emulator)


@pytest.mark.parametrize("features", [1, 20, 85])
@pytest.mark.parametrize("unit", ["v", "p * v * s - code", "g - v * g"])
def test_units(emulator, unit, features):
    tensors = points(70, 150, 20) | {
        "v": ((COL, FEATURE), normal(6, 1, 150, features)),
        "g": ((ROW, FEATURE), normal(7, 1, 70, features)),
        "code": ((ROW,), torch.arange(70, dtype=torch.int32)[None] % 5),
        "p": ((), torch.tensor(0.7)),
    }
    used = {name: each for name, each in tensors.items() if name in f"{SCALED} {unit}"}
    case = Case(SCALED, used, unit=unit)
    case.check(emulator, 1e-5)


# Formulas with several terms, scalars, conditions and what has a value for each pair.
FORMULAS = [
    "where((col <= row) and flag, sum(x * y) / p, bias)",
    "exp(-sum(((x - y) / ell) ** 2) / 8 + bias) * sum(x * y) / sqrt(sum(x * x) * sum(y * y))",
    "1 / (1 + sum((x * s - y) ** 2)) ** 1.5 + sum(pairs * x) + codes // 3 + 0 * w",
    "bias * s + (row - col) * t",
]


@pytest.mark.few(len(FORMULAS))
@pytest.mark.parametrize("reduction", ["matrix", "sum"])
@pytest.mark.parametrize("text", FORMULAS)
def test_formulas(emulator, text, reduction):
    tensors = points(37, 90, 18) | {
        "ell": ((FEATURE,), positive(7, 1, 18)),
        "p": ((), 1.7),
        "flag": ((COL,), normal(8, 1, 90) > 0),
        "bias": ((ROW, COL), normal(9, 1, 90, 37).mT),
        "codes": ((ROW, COL), torch.arange(37 * 90).view(1, 37, 90) * 3_000_000_007),
        "pairs": ((ROW, COL, FEATURE), normal(10, 1, 37, 90, 18)),
    }
    used = {name: each for name, each in tensors.items() if name in text}
    used |= {name: tensors[name] for name in ("s", "t")}
    Case(text, used, reduction).check(emulator, 1e-5)


@pytest.mark.parametrize(("reduction", "unit"), [("sum", "v"), ("logsumexp", None), ("min", None)])
def test_ranges(emulator, reduction, unit):
    """Some of which are empty; values that no row reads may be anything."""
    first = torch.arange(100) * 7 % 210 - 3
    ranges = torch.stack([first, first + torch.arange(100) % 90 - 5], 1).clamp(0, 190)
    tensors = points(100, 200, 20)
    if unit:
        tensors["v"] = (COL, FEATURE), normal(6, 1, 200, 3)
        tensors["v"][1][0, 190:] = torch.inf
        case = Case(SCALED, tensors, reduction, unit, ranges)
        results, _ = case.run(emulator)
        tensors["v"][1][0, 190:] = 0.0
        assert torch.equal(results, case.run(emulator)[0])
    Case(SCALED, tensors, reduction, unit, ranges).check(emulator)


@pytest.mark.parametrize(("reduction", "empty"), [("sum", 0), ("logsumexp", -torch.inf),
                                                  ("min", torch.inf)])  # fmt: skip
def test_rows_without_columns(emulator, reduction, empty):
    case = Case(SCALED, points(3, 0, 2), reduction)
    results, indices = case.run(emulator, by_tiles(case))
    assert (results == empty).all() and (indices is None or (indices == 0).all())


def test_a_matrix_without_columns_has_no_launch():
    assert choose.lower(Case(SCALED, points(3, 0, 2), "matrix").problem(), GPU).steps == ()


def test_many_columns_are_divided_among_blocks(emulator):
    case = Case(SCALED, points(5, 1000, 70), "min")
    assert len(choose.lower(case.problem(), GPU).steps) == 2
    case.check(emulator)
