"""Pruning by magnitude: exact counts, the same choice everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kernlib.families.sparse.prune import PER, largest
from kernlib.sparse import magnitude

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)
SHAPES = ((37, 53), (5,), (), (0, 4), (4, 0), (2, 3, 4), (1, 1), (1, 300), (300, 1))


def chosen(weight: torch.Tensor, density: float, per: str) -> torch.Tensor:
    """What stays, by a stable sort of each row."""
    size = weight.shape[-1] if per == "row" and weight.dim() else weight.numel()
    found = torch.zeros(weight.shape, dtype=torch.bool)
    if size:
        keys = weight.double().abs().nan_to_num(nan=math.inf, posinf=1e308).reshape(-1, size)
        order = keys.argsort(dim=1, descending=True, stable=True)[:, : round(density * size)]
        found.view(-1, size).scatter_(1, order, True)
    return found


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_entries_stay_as_many_as_asked_for(dtype, per, seed):
    for shape in SHAPES:
        weight = torch.randn(shape).to(dtype)
        for density in (0, 0.1, 1 / 3, 0.5, 0.999, 1, 1.0):
            kept = largest(weight, density, per)
            assert torch.equal(kept, chosen(weight, density, per)), (shape, density)


@pytest.mark.parametrize("per", PER)
def test_of_equal_entries_the_first_stay(per, seed):
    weight = torch.randint(-2, 3, (20, 30)).half()
    weight[::3] = 1.0
    for density in (0.1, 0.35, 0.6, 0.9):
        assert torch.equal(largest(weight, density, per), chosen(weight, density, per))
    assert largest(torch.ones(4, 4), 0.25)[0].all()
    assert largest(torch.zeros(4, 4), 0.5).sum() == 8


def test_signs_nan_and_infinity():
    weight = torch.tensor([-0.0, 3.0, math.nan, -math.inf, -5.0, 4.0])
    assert largest(weight, 1 / 6).tolist() == [False, False, True, False, False, False]
    assert largest(weight, 0.5).tolist() == [False, False, True, True, True, False]
    found = magnitude(weight, 0.5)
    assert found.isnan().tolist()[2] and found.tolist()[3:] == [-math.inf, -5.0, 0.0]
    assert largest(-torch.tensor(torch.nan).repeat(3), 1 / 3).tolist() == [True, False, False]


def test_values_keep_their_bits_and_strides_do_not_matter(seed):
    weight = torch.randn(64, 48).half()
    turned = weight.t().contiguous().t()
    wanted = torch.where(largest(weight, 0.3), weight, 0)
    for one in (weight, turned, torch.randn(64, 96).half()[:, ::2].copy_(weight)):
        assert torch.equal(magnitude(one, 0.3), wanted)
    assert torch.count_nonzero(wanted) == round(0.3 * 64 * 48)


def test_elements_that_share_memory_are_not_written():
    weight = torch.arange(1.0, 8.0).expand(3, 7)
    with pytest.raises(ValueError, match="weight overlaps itself"):
        magnitude(weight, 0.5, inplace=True)
    assert torch.count_nonzero(weight) == 21
    assert torch.count_nonzero(magnitude(weight, 0.5)) == round(0.5 * 21)


def test_in_place_or_not():
    layer = nn.Linear(20, 30)
    before = layer.weight.detach().clone()
    made = magnitude(layer.weight, 0.5)
    assert torch.equal(layer.weight, before) and not made.requires_grad
    found = magnitude(layer.weight, 0.5, inplace=True)
    assert found is layer.weight and torch.equal(found, made) and found.requires_grad
    assert found.is_leaf and torch.count_nonzero(found) == 300


WRONG = {
    "list": ([[1.0]], 0.5, "matrix", TypeError, "weight must be a tensor of floats, got list"),
    "ints": (torch.ones(2, 2).int(), 0.5, "matrix", TypeError, "floats, got torch.int32"),
    "no zero": (
        torch.zeros(3, dtype=torch.uint8).view(torch.float8_e8m0fnu), 0.5, "matrix", TypeError,
        "weight must be a",
    ),
    "text": (torch.ones(2, 2), "half", "matrix", TypeError, "density must be a number"),
    "bool": (torch.ones(2, 2), True, "matrix", TypeError, "density must be a number"),
    "above": (torch.ones(2, 2), 1.5, "matrix", ValueError, "from 0 to 1, got 1.5"),
    "below": (torch.ones(2, 2), -0.1, "matrix", ValueError, "from 0 to 1, got -0.1"),
    "nan": (torch.ones(2, 2), math.nan, "matrix", ValueError, "from 0 to 1, got nan"),
    "per": (torch.ones(2, 2), 0.5, "column", ValueError, "one of matrix, row, got 'column'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    weight, density, per, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        magnitude(weight, density, per)


EIGHT_BITS = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_floats_of_eight_bits(dtype, inplace, seed):
    weight = torch.randn(20, 30).to(dtype)
    weight[3, 4] = torch.tensor(math.nan).to(dtype)
    wanted = torch.where(chosen(weight, 0.3, "matrix"), weight.float(), 0.0)
    found = magnitude(weight, 0.3, inplace=inplace)
    assert found.dtype == dtype and (found is weight) is inplace and wanted.isnan().sum() == 1
    assert torch.equal(found.float().nan_to_num(99), wanted.nan_to_num(99))


@pytest.mark.parametrize("inplace", [False, True])
def test_views_whose_memory_holds_other_values(inplace, seed):
    weight = torch.view_as_complex(torch.randn(20, 30, 2)).conj().imag
    wanted = magnitude(weight.clone(), 0.3)
    found = magnitude(weight, 0.3, inplace=inplace)
    assert torch.equal(found, wanted) and torch.equal(largest(weight, 1), torch.ones(20, 30) > 0)
    zero = torch._efficientzerotensor((3, 4))
    assert magnitude(zero, 0.5).tolist() == [[0.0] * 4] * 3
    with pytest.raises(ValueError, match="weight is a zero tensor"):
        magnitude(zero, 0.5, inplace=True)


@pytest.mark.parametrize("power", [2, 400, 9999])
def test_numbers_that_are_no_part_are_refused(power):
    for density in (10**power, -(10**power), math.nan, math.inf, -0.1, 1.01):
        with pytest.raises(ValueError, match="density must be from 0 to 1, got"):
            magnitude(torch.ones(3), density)


def test_flags_and_names_are_what_they_say():
    for wrong in ("no", 1, None, torch.tensor(True)):
        with pytest.raises(TypeError, match="inplace must be a bool"):
            magnitude(torch.ones(3), 0.5, inplace=wrong)
    for wrong in ("rows", None, ["row"], torch.ones(3)):
        with pytest.raises(ValueError, match="per must be one of matrix, row"):
            magnitude(torch.ones(3), 0.5, wrong)
