"""The kernel of matrices with categories, whose text threads of the host run, against float64."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise import matrix
from kernlib.families.pairwise.categories import operation
from kernlib.families.pairwise.kernels.direct import Direct
from tests.families.pairwise.categories.cases import Case, drawn, sums, table_sums
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.emulation.gpus import gpu
from tests.support.fakes import OnGpu

pytestmark = pytest.mark.emulated
BOUND = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kernels_of(tmp_path_factory)


@pytest.fixture
def gpus(monkeypatch, folder):
    return emulated.install(monkeypatch, folder, matrix, operation)


@pytest.fixture
def large_tile(monkeypatch):
    """The tile of large calls, for small ones."""
    known = Direct.choices
    monkeypatch.setattr(Direct, "choices", lambda self, call, arch: known(
        self, call._replace(problem=call.problem._replace(m=1000, n=1000)), arch)[:1])  # fmt: skip


def on_gpu(case: Case) -> Case:
    return Case(*map(gpu, case))


def close(found, wanted, dtype=torch.float32) -> bool:
    assert isinstance(found, OnGpu)
    found = found.as_subclass(torch.Tensor).double()
    return ((found - wanted).abs() <= BOUND[dtype] * wanted.abs().clamp(min=1)).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("codes", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 40), (2,) * 9, (4, 120, 6, 90, 2)], ids=str)
def test_values(sizes, codes, gpus):
    """One feature, several, more than a group, and tables that do not fit beside others."""
    case = drawn(67, 130, 5, sizes, torch.float32, codes)
    found = on_gpu(case).run(kl.laplace_l1(categories=len(sizes)), bandwidth=3.0)
    assert close(found, torch.exp(-sums(case, 1) / 3))
    assert len(gpus.specs) == 1


@pytest.mark.parametrize("k", [0, 1, 16, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_every_number_of_features_and_type(k, dtype, gpus):
    case = drawn(65, 66, k, (4, 3), dtype)
    out = torch.empty(65, 66, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    found = on_gpu(case).run(kl.l2_distance(categories=2), out=gpu(out))
    assert close(found, sums(case, 2).sqrt(), dtype)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e5])
@pytest.mark.parametrize("descriptor", [kl.power_sum(categories=9), kl.p_distance(categories=9)],
                         ids=["sums", "norms"])  # fmt: skip
def test_sums_leave_the_unit_of_their_tile_once(descriptor, scale, gpus):
    """Powers are taken in a tile's unit, which tables have none of, of two groups of features."""
    case = drawn(65, 66, 5, (3,) * 9, torch.float32)
    tables = [table * scale**1.3 for table in case.tables]
    case = case._replace(a=case.a * scale, b=case.b * scale, tables=tables)
    found = on_gpu(case).run(descriptor, p=1.3).as_subclass(torch.Tensor).double()
    wanted = sums(case, 1.3)
    wanted = wanted if descriptor == kl.power_sum(categories=9) else wanted ** (1 / 1.3)
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=0)


@pytest.mark.parametrize("k", [5, 70])
@pytest.mark.parametrize("sizes", [(5, 3), (2,) * 9, (70, 60, 90)], ids=str)
def test_large_tiles(k, sizes, gpus, large_tile):
    case = drawn(130, 129, k, sizes, torch.float32)
    found = on_gpu(case).run(kl.squared_distance(categories=len(sizes)))
    assert close(found, sums(case, 2)) and "tile=128" in gpus.specs[0].description


def test_a_code_outside_its_table_reads_nothing(gpus):
    case = drawn(70, 66, 3, (4, 9), torch.float32)
    case.a_codes[3, 0], case.a_codes[69, 1], case.b_codes[5, 1] = -1, 9, 2**40
    case.b_codes[65, 0] = -(2**62)
    found = on_gpu(case).run(kl.l1_distance(categories=2)).as_subclass(torch.Tensor)
    wanted = sums(case, 1)
    assert wanted.isnan().any() and torch.equal(found.isnan(), wanted.isnan())
    assert close(gpu(found.nan_to_num(0)), wanted.nan_to_num(0))


def test_tables_need_not_be_symmetric_and_out_may_lie_by_columns(gpus):
    case = drawn(70, 40, 3, (6, 6), torch.float32)
    whole = case._replace(tables=torch.stack(case.tables))
    out = torch.zeros(40, 70).T
    given = {"bandwidth": 2.0, "regularization": 0.5, "row_offset": 2}
    found = on_gpu(whole).run(kl.gaussian(categories=2), out=gpu(out), accumulate=True, **given)
    wanted = torch.exp(-sums(case, 2) / 8)
    wanted.diagonal(2).add_(0.5)
    assert close(found, wanted)


def test_codes_of_any_strides_and_types(gpus):
    case = drawn(65, 70, 3, (6, 6, 2), torch.float32)
    strided = torch.full((3, 130), 77, dtype=torch.int32)
    strided[:, ::2] = case.a_codes.T
    other = case._replace(a_codes=strided[:, ::2].T, b_codes=case.b_codes.to(torch.uint8))
    found = on_gpu(other).run(kl.l1_distance(categories=3))
    assert close(found, sums(case, 1))


@pytest.mark.parametrize("name", ["a", "b", "a_codes", "b_codes", "tables", "bandwidth"])
def test_batches(name, gpus):
    cases = [drawn(65, 34, 5, (4, 4), torch.float32, seed=seed) for seed in (1, 2, 3)]
    one, bandwidths = cases[0], [1.0, 2.0, 4.0]
    if name == "bandwidth":
        given, parts = gpu(torch.tensor(bandwidths)), [one] * 3
        found = on_gpu(one).run(kl.laplace_l1(categories=2), bandwidth=given)
    else:
        each = [torch.stack(c.tables) if name == "tables" else getattr(c, name) for c in cases]
        parts = [one._replace(**{name: getattr(c, name)}) for c in cases]
        batch, bandwidths = one._replace(**{name: torch.stack(each)}), [2.0] * 3
        found = on_gpu(batch).run(kl.laplace_l1(categories=2), bandwidth=2.0)
    wanted = [torch.exp(-sums(c, 1) / h) for c, h in zip(parts, bandwidths, strict=True)]
    assert close(found, torch.stack(wanted))


@pytest.mark.few(1)
def test_roots_of_negative_sums_and_numbers_that_are_none(gpus):
    case = drawn(65, 34, 3, (4, 4), torch.float32)
    case.tables[0][1, 2], case.tables[1] = math.nan, case.tables[1] - 6
    case.a[7, 1], case.b[9, 0] = math.nan, math.inf
    wanted = sums(case, 2)
    found = on_gpu(case).run(kl.l2_distance(categories=2)).as_subclass(torch.Tensor).double()
    torch.testing.assert_close(found, wanted.sqrt(), rtol=1e-5, atol=2e-3, equal_nan=True)
    assert (wanted < 0).any() and (table_sums(case) < -3).any()


def test_what_is_empty_is_not_launched(gpus):
    for m, n in ((0, 4), (4, 0)):
        found = on_gpu(drawn(m, n, 3, (3,), torch.float32)).run(kl.l1_distance(categories=1))
        assert found.shape == (m, n)
    assert gpus.specs == []


@pytest.mark.few(1)
def test_a_second_call_is_made_of_the_first_ones_plan(gpus, monkeypatch):
    case, descriptor = on_gpu(drawn(65, 34, 3, (4,), torch.float32)), kl.gaussian(categories=1)
    first = case.run(descriptor, bandwidth=2.0)
    monkeypatch.setattr(operation, "lower", None)
    second = case.run(descriptor, bandwidth=2.0)
    assert torch.equal(first, second) and len(gpus.loads) == 1
    assert not torch.equal(case.run(descriptor, bandwidth=3.0), first)
