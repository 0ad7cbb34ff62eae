"""Matrices of points with categories on CPU tensors, and against float64 pair by pair."""

import math

import pytest
import torch

import kernlib as kl
from kernlib import Power, Root
from tests.families.pairwise.categories.cases import Case, drawn, sums

SIZES = (4, 1, 7)
CASE = drawn(13, 17, 5, SIZES)
DESCRIPTORS = {  # the value for sums s of a p, and its arguments
    "l1": (kl.l1_distance, 1, lambda s: s, {}),
    "l2": (kl.l2_distance, 2, lambda s: s.sqrt(), {}),
    "power": (kl.power_sum, 0.7, lambda s: s, {"p": 0.7}),
    "norm": (kl.p_distance, 1.3, lambda s: s ** (1 / 1.3), {"p": 1.3}),
    "gaussian": (kl.gaussian, 2, lambda s: torch.exp(-s / 8), {"bandwidth": 2.0}),
    "laplace": (kl.laplace_l2, 2, lambda s: torch.exp(-s.sqrt() / 2), {"bandwidth": 2.0}),
    "pq": (
        kl.laplace_pq,
        1.3,
        lambda s: torch.exp(-((s ** (1 / 1.3) / 2) ** 0.8)),
        {"p": 1.3, "bandwidth": 2.0, "q": 0.8},
    ),
    "matern": (
        kl.matern32,
        2,
        lambda s: (1 + (3 * s).sqrt() / 2) * torch.exp(-(3 * s).sqrt() / 2),
        {"bandwidth": 2.0},
    ),
}


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_tables_add_to_the_sums(name):
    make, p, value, arguments = DESCRIPTORS[name]
    found = CASE.run(make(categories=3), **arguments)
    torch.testing.assert_close(found, value(sums(CASE, p)), rtol=1e-13, atol=1e-13)


def test_a_dot_product_has_tables_too():
    found = CASE.run(kl.dot_product(categories=3))
    expected = CASE.a @ CASE.b.T + sums(CASE, 1) - sums(CASE._replace(tables=zeros()), 1)
    torch.testing.assert_close(found, expected)


def zeros() -> list:
    return [torch.zeros_like(table) for table in CASE.tables]


def test_tables_of_zeros_change_nothing():
    found = CASE._replace(tables=zeros()).run(kl.gaussian(categories=3), bandwidth=2.0)
    torch.testing.assert_close(found, kl.run_kernel(kl.gaussian(), CASE.a, CASE.b, bandwidth=2.0))


@pytest.mark.parametrize("types", [(torch.int64, torch.int32), (torch.uint8, torch.int8)])
def test_codes_of_every_integer_type(types):
    other = CASE._replace(a_codes=CASE.a_codes.to(types[0]), b_codes=CASE.b_codes.to(types[1]))
    descriptor = kl.l1_distance(categories=3)
    assert torch.equal(other.run(descriptor), CASE.run(descriptor))


def test_one_tensor_of_tables_and_a_list():
    case = drawn(6, 5, 3, (4, 4))
    descriptor = kl.l1_distance(categories=2)
    whole = case._replace(tables=torch.stack(case.tables))
    assert torch.equal(whole.run(descriptor), case.run(descriptor))


def test_a_code_outside_its_table_makes_nan_of_its_pairs():
    case = CASE._replace(a_codes=CASE.a_codes.clone(), b_codes=CASE.b_codes.clone())
    case.a_codes[2, 0], case.a_codes[5, 1], case.b_codes[4, 2] = -1, 1, 2**40
    found, right = case.run(kl.l1_distance(categories=3)), CASE.run(kl.l1_distance(categories=3))
    bad = torch.zeros(13, 17, dtype=torch.bool)
    bad[2], bad[5], bad[:, 4] = True, True, True
    assert found[bad].isnan().all() and torch.equal(found[~bad], right[~bad])


def test_an_entry_that_is_no_number_stays_where_it_is_read():
    tables = [CASE.tables[0].clone(), *CASE.tables[1:]]
    tables[0][1, 2] = math.nan
    found = CASE._replace(tables=tables).run(kl.laplace_l1(categories=3), bandwidth=1.0)
    read = (CASE.a_codes[:, :1] == 1) & (CASE.b_codes[:, 0] == 2)
    assert read.any() and torch.equal(found.isnan(), read)


def test_a_negative_sum_has_no_root():
    low = CASE._replace(tables=[table - 100 for table in CASE.tables])
    assert low.run(kl.l2_distance(categories=3)).isnan().all()
    assert low.run(kl.p_distance(categories=3), p=1.3).isnan().all()
    assert (low.run(kl.l1_distance(categories=3)) < 0).all()


def batched(dtype=torch.float64) -> list[Case]:
    return [drawn(9, 6, 3, (4, 4), dtype, seed=seed) for seed in (1, 2)]


def test_batches_of_each_argument():
    cases, descriptor = batched(), kl.laplace_l1(categories=2)
    entries = {
        "a": torch.stack([case.a for case in cases]),
        "b": torch.stack([case.b for case in cases]),
        "a_codes": torch.stack([case.a_codes for case in cases]),
        "b_codes": torch.stack([case.b_codes for case in cases]),
        "tables": torch.stack([torch.stack(case.tables) for case in cases]),
    }
    for name, batch in entries.items():
        found = cases[0]._replace(**{name: batch}).run(descriptor, bandwidth=2.0)
        assert found.shape == (2, 9, 6)
        for l, case in enumerate(cases):
            one = cases[0]._replace(**{name: getattr(case, name)})
            torch.testing.assert_close(found[l], one.run(descriptor, bandwidth=2.0))
        one = cases[0]._replace(**{name: batch[:1]})
        found = one.run(descriptor, bandwidth=2.0)
        out = torch.zeros(9, 6, dtype=torch.float64)
        assert found.shape == (1, 9, 6)
        assert torch.equal(one.run(descriptor, bandwidth=2.0, out=out), found[0])
    assert cases[0].run(descriptor, bandwidth=torch.ones(1).double()).shape == (9, 6)
    every = Case(**entries).run(descriptor, bandwidth=torch.tensor([1.0, 3.0]).double())
    for l, bandwidth in enumerate((1.0, 3.0)):
        torch.testing.assert_close(every[l], cases[l].run(descriptor, bandwidth=bandwidth))


def test_out_and_a_block_that_finds_its_diagonal():
    descriptor = kl.gaussian(categories=3)
    whole = CASE.run(descriptor, bandwidth=2.0, regularization=0.5)
    out = torch.ones(17, 9, dtype=torch.float64).T
    part = CASE._replace(a=CASE.a[4:], a_codes=CASE.a_codes[4:])
    given = {"bandwidth": 2.0, "regularization": 0.5, "row_offset": 4}
    assert part.run(descriptor, out=out, accumulate=True, **given) is out
    torch.testing.assert_close(out, whole[4:] + 1)
    assert part.run(descriptor, out=out, **given) is out
    torch.testing.assert_close(out, whole[4:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype):
    case, descriptor = drawn(9, 8, 4, (3, 5), dtype), kl.gaussian(categories=2)
    wide = torch.empty(9, 8, dtype=torch.float32)
    case.run(descriptor, bandwidth=2.0, out=wide)
    expected = torch.exp(-sums(case, 2) / 8)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(case.run(descriptor, bandwidth=2.0), wide.to(dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 3), (5, 0, 3), (5, 4, 0)])
def test_empty_ones(m, n, k):
    case = drawn(m, n, k, (3, 2))
    found = case.run(kl.laplace_l1(categories=2), bandwidth=2.0)
    torch.testing.assert_close(found, torch.exp(-sums(case, 1) / 2))


def test_a_lengthscale_is_of_numerical_features():
    scale = torch.rand(5, dtype=torch.float64) + 0.5
    found = CASE.run(kl.gaussian(categories=3), lengthscale=scale)
    other = CASE._replace(a=CASE.a / scale, b=CASE.b / scale)
    torch.testing.assert_close(found, other.run(kl.gaussian(categories=3), bandwidth=1.0))


def test_stages_of_ones_choice():
    descriptor = kl.Pairwise(inner=Power(), outer=Root(), categories=3)
    torch.testing.assert_close(CASE.run(descriptor, p=0.5), sums(CASE, 0.5) ** 2)
    descriptor = kl.Pairwise(inner=kl.Abs(), outer=Power(), categories=3)
    torch.testing.assert_close(CASE.run(descriptor, outer_p=1.7), sums(CASE, 1) ** 1.7)


def test_rows_are_computed_by_blocks(monkeypatch):
    from kernlib.families.pairwise.categories import operation

    whole = CASE.run(kl.gaussian(categories=3), bandwidth=2.0, regularization=1.0)
    monkeypatch.setattr(operation, "CPU_ENTRIES", 40)
    parts = CASE.run(kl.gaussian(categories=3), bandwidth=2.0, regularization=1.0)
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=0)
