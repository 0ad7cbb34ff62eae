"""Reductions of few features, by the text of their kernels on the host."""

import pytest
import torch

from kernlib.families.pairwise.formula.lowering import choose
from kernlib.lowering.kernel import Gpu
from tests.families.pairwise.formula.lowering.cases import (
    COL,
    FEATURE,
    ROW,
    Case,
    normal,
    points,
    positive,
)

SCALED = "exp(-sum((x - y) ** 2) / (s * t)) * w"
SIZES = [(1, 1, 1), (3, 65, 2), (129, 300, 3), (1100, 40, 3)]


@pytest.mark.few(len(SIZES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("rows", "cols", "features"), SIZES)
def test_sums(emulator, rows, cols, features, dtype):
    result = "float64" if dtype == "float64" else "float32"
    Case(SCALED, points(rows, cols, features, dtype, 2), result=result).check(emulator)


@pytest.mark.parametrize("reduction", ["logsumexp", "min"])
@pytest.mark.parametrize("result", ["float32", "float64"])
def test_other_reductions(emulator, reduction, result):
    tensors = points(70, 333, 3, result)
    Case("-sum(abs(x - y)) / s + w * t", tensors, reduction, result=result).check(emulator)


# Formulas, units and reductions, of points, conditions, whole numbers and scalars.
FORMULAS = [
    ("where((col <= row) and flag, sum(x * y) / p, -0.5)", None),
    ("exp(-sum(abs(x - y)) * s) * exp(w - sum((x * t - y) ** 2) / 3)", None),
    ("sum(x * y) / sqrt(sum(x * x) * sum(y * y))", None),
    ("1 / (1 + sum(((x - y) / ell) ** 2)) ** 1.5", None),
    ("where(code == other, s, t) * float_of", None),
    ("floor(s * 3) + mod(code, 3) + big // 3 - (row - col) * 2", None),
    ("max(s, t) - min(w, p) + sign(w) + tanh(s * w) + big * 1e-12", None),
    ("exp(-sum((x - y) ** 2) * p)", "v * s"),
    ("w * exp(-sum((x - y) ** 2) / (2 * p ** 2))", "-2 * (x - y)"),
]


@pytest.mark.few(len(FORMULAS))
@pytest.mark.parametrize(("text", "unit"), FORMULAS)
def test_formulas(emulator, text, unit):
    tensors = points(37, 90, 3)
    tensors |= {
        "v": ((COL, FEATURE), normal(6, 1, 90, 21)),
        "ell": ((FEATURE,), positive(7, 1, 3)),
        "p": ((), 1.7),
        "float_of": ((), torch.tensor(0.3)),
        "flag": ((COL,), normal(8, 1, 90) > 0),
        "code": ((ROW,), torch.arange(37, dtype=torch.int32)[None] % 5 - 2),
        "other": ((COL,), torch.arange(90)[None] % 5 - 2),
        "big": ((COL,), torch.arange(90)[None] * 3_000_000_007 - 2**33),
    }
    used = {name: each for name, each in tensors.items() if name in f"{text} {unit}"}
    used |= {name: tensors[name] for name in ("s", "t")}
    Case(text, used, unit=unit).check(emulator, 1e-5)


@pytest.mark.parametrize("reduction", ["sum", "logsumexp", "min"])
def test_ranges(emulator, reduction):
    """Some of which are empty, and some go past the last column."""
    first = torch.arange(300) * 7 % 210 - 3
    ranges = torch.stack([first, first + torch.arange(300) % 90 - 5], 1)
    Case(SCALED, points(300, 200, 2), reduction, ranges=ranges).check(emulator)


@pytest.mark.parametrize("reduction", ["sum", "logsumexp"])
def test_ranges_of_clusters(emulator, reduction):
    """Runs of columns that all rows of a thread have, and that none has."""
    place = torch.arange(3000)[:, None] // 1100 * 150
    ranges = place + torch.tensor([[3, 150]])
    Case(SCALED, points(3000, 450, 2), reduction, ranges=ranges).check(emulator)


def test_a_minimum_is_the_first_of_equals_and_a_nan(emulator):
    tensors = {"s": ((ROW,), torch.tensor([[0.0, torch.inf, torch.nan]])),
               "t": ((COL,), torch.zeros(1, 500))}  # fmt: skip
    tensors["t"][1][0, [7, 123]] = -1.0
    results = Case("t + s", tensors, "min").check(emulator)
    assert results[0, 0] == -1 and results[0, 1].isinf() and results[0, 2].isnan()


@pytest.mark.parametrize(("reduction", "empty"), [("sum", 0), ("logsumexp", -torch.inf),
                                                  ("min", torch.inf)])  # fmt: skip
def test_rows_without_columns(emulator, reduction, empty):
    case = Case(SCALED, points(3, 0, 2), reduction)
    results, indices = case.run(emulator)
    assert (results == empty).all() and (indices is None or (indices == 0).all())


def test_what_depends_on_a_row_or_a_column_is_computed_there():
    case = Case(SCALED, points(5000, 5000, 3))
    (step, *_) = choose.lower(case.problem(), Gpu("sm_90a", 132)).steps
    assert "return (exp2_approximate((sums[0] * r[0] * c[0])) * c[1]);" in step.spec.source
    assert "r[0] = for_exp2((-reciprocal(element" in step.spec.source


def test_few_rows_share_their_columns_among_threads_and_blocks(emulator):
    case = Case(SCALED, points(3, 4000, 2))
    steps = choose.lower(case.problem(), Gpu("sm_90a", 4)).steps
    assert len(steps) == 2 and "PARTNERS = 32" in steps[0].spec.source
    case.check(emulator)


@pytest.mark.parametrize("result", ["float32", "float64"])
def test_log_sum_exps_of_any_size(emulator, result):
    """Of scores in thousands, of infinite ones, and a NaN."""
    rows = torch.tensor([[0.0, -3000.0, 1e6, -torch.inf, torch.inf, torch.nan]])
    tensors = {"s": ((ROW,), rows.to(getattr(torch, result))),
               "t": ((COL,), normal(1, 1, 700, dtype=result) * 300)}  # fmt: skip
    results = Case("s + t", tensors, "logsumexp", result=result).check(emulator)
    assert results[0, 3] == -torch.inf and results[0, 4] == torch.inf and results[0, 5].isnan()
