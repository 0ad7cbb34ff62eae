"""Matrices of points with categories on the GPU, against float64 on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from tests.families.pairwise.categories.cases import Case, drawn
from tests.gpu.families.pairwise.cases import TOLERANCE, relative_error
from tests.gpu.watched import capture, nothing_waits

SIZES = [(1,), (7,), (3, 40), (2,) * 9, (4, 120, 6, 90, 2), (5,) * 20]


def gathered(case: Case) -> torch.Tensor:
    """What the tables add in float64, NaN where a code is outside."""
    total = 0.0
    for c, table in enumerate(case.tables):
        table, size = table.double().cpu(), table.shape[0]
        rows, columns = (t[:, c].cpu().long() for t in (case.a_codes, case.b_codes))
        found = table[rows.clamp(0, size - 1)][:, columns.clamp(0, size - 1)]
        outside = [(t < 0) | (t >= size) for t in (rows, columns)]
        found[outside[0]], found[:, outside[1]] = math.nan, math.nan
        total = total + found
    return total


def sums(case: Case, p: float) -> torch.Tensor:
    a, b = case.a.double().cpu(), case.b.double().cpu()
    return torch.stack([(x - b).abs().pow(p).sum(-1) for x in a]) + gathered(case)


def on_gpu(*given, **options) -> Case:
    return drawn(*given, device="cuda", **options)


@pytest.mark.parametrize("codes", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(sizes, dtype, codes):
    for m, n, k in ((131, 259, 5), (1, 300, 17), (257, 64, 100), (64, 1, 3)):
        case = on_gpu(m, n, k, sizes, dtype, codes)
        found = case.run(kl.laplace_l1(categories=len(sizes)), bandwidth=20.0)
        error = relative_error(found, torch.exp(-sums(case, 1) / 20))
        assert error <= 2 * TOLERANCE[dtype], (m, n, k, error)


@pytest.mark.parametrize("k", (3, 100))
@pytest.mark.parametrize("p", (0.5, 0.7, 1.0, 1.3, 2.0, 3.0))
def test_every_kind_of_exponent(p, k):
    case = on_gpu(300, 200, k, (4, 9), torch.float32)
    wanted = sums(case, p)
    for given in (p, torch.tensor(p, device="cuda")):
        found = case.run(kl.power_sum(categories=2), p=given)
        assert relative_error(found, wanted) <= 3e-6
        found = case.run(kl.p_distance(categories=2), p=given)
        assert relative_error(found, wanted ** (1 / p)) <= 5e-6
        # About what distances are: an exponent of 60 has 60 times a distance's error.
        size = k ** (1 / p)
        found = case.run(kl.laplace_pq(categories=2), p=given, q=0.9, bandwidth=size)
        assert relative_error(found, torch.exp(-((wanted ** (1 / p) / size) ** 0.9))) <= 5e-6


def test_data_far_from_one_is_added_in_its_own_unit():
    """Sums are taken in a tile's unit; tables are not."""
    for scale in (1e-6, 1e6):
        case = on_gpu(200, 150, 6, (4, 3), torch.float32)
        size = scale**1.3
        case = case._replace(
            a=case.a * scale, b=case.b * scale, tables=[t * size for t in case.tables]
        )
        found = case.run(kl.p_distance(categories=2), p=1.3)
        assert relative_error(found, sums(case, 1.3) ** (1 / 1.3)) <= 5e-6


@pytest.mark.parametrize("m", (130, 2000))
def test_codes_outside_and_numbers_that_are_none(m):
    case = on_gpu(m, 333, 4, (4, 30, 3), torch.float32)
    case.a_codes[3, 0], case.a_codes[m - 1, 1], case.b_codes[5, 2] = -1, 30, 2**40
    case.b_codes[332, 0], case.tables[1][2, 7], case.a[8, 1] = -(2**62), math.nan, math.nan
    found, wanted = case.run(kl.l1_distance(categories=3)).cpu(), sums(case, 1)
    assert torch.equal(found.isnan(), wanted.isnan()) and wanted.isnan().any()
    assert relative_error(found.nan_to_num(0), wanted.nan_to_num(0)) <= 2e-6


def test_negative_sums_have_no_root():
    case = on_gpu(130, 70, 3, (4,), torch.float32)
    case = case._replace(tables=[case.tables[0] - 100])
    assert case.run(kl.l2_distance(categories=1)).isnan().all()
    for p in (1.3, torch.tensor(1.3, device="cuda")):
        assert case.run(kl.p_distance(categories=1), p=p).isnan().all()


def test_out_by_columns_accumulate_and_the_diagonal():
    case = on_gpu(150, 140, 3, (6, 6), torch.float32)
    wanted = torch.exp(-sums(case, 2) / 8)
    wanted.diagonal(2).add_(0.5)
    out = torch.zeros(140, 150, device="cuda").T
    given = {"bandwidth": 2.0, "regularization": 0.5, "row_offset": 2}
    for times in (1, 2):
        case.run(kl.gaussian(categories=2), out=out, accumulate=True, **given)
        assert relative_error(out, times * wanted) <= 2e-6


@pytest.mark.parametrize("name", ("a", "b", "a_codes", "b_codes", "tables", "bandwidth"))
def test_batches(name):
    cases = [on_gpu(131, 70, 6, (4, 4), torch.float32, seed=seed) for seed in (1, 2, 3)]
    descriptor, bandwidths = kl.laplace_l1(categories=2), [1.0, 2.0, 4.0]
    if name == "bandwidth":
        found = cases[0].run(descriptor, bandwidth=torch.tensor(bandwidths, device="cuda"))
        parts = [cases[0]] * 3
    else:
        each = [torch.stack(c.tables) if name == "tables" else getattr(c, name) for c in cases]
        parts = [cases[0]._replace(**{name: getattr(c, name)}) for c in cases]
        bandwidths = [2.0] * 3
        found = cases[0]._replace(**{name: torch.stack(each)}).run(descriptor, bandwidth=2.0)
    wanted = [torch.exp(-sums(c, 1) / h) for c, h in zip(parts, bandwidths, strict=True)]
    assert relative_error(found, torch.stack(wanted)) <= 2e-6


@pytest.mark.parametrize(("m", "n", "k"), ((0, 5, 3), (5, 0, 3), (70, 66, 0)))
def test_empty_ones(m, n, k):
    case = on_gpu(m, n, k, (3, 2), torch.float32)
    found = case.run(kl.laplace_l1(categories=2), bandwidth=2.0)
    assert found.shape == (m, n)
    assert relative_error(found, torch.exp(-gathered(case) / 2)) <= 2e-6


@pytest.mark.parametrize("name", ("gaussian", "norm"))
def test_gradients(name, monkeypatch):
    from kernlib.families.pairwise.categories import operation

    monkeypatch.setattr(operation, "BLOCK_ENTRIES", 50 * 90)
    make, values = {
        "gaussian": (kl.gaussian, {"bandwidth": 2.0}),
        "norm": (kl.laplace_pq, {"p": 1.3, "bandwidth": 3.0, "q": 0.9}),
    }[name]
    weights, found = torch.rand(130, 90, dtype=torch.float64), []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        case = drawn(130, 90, 5, (4, 7), torch.float32)
        given = [
            t.to(device, dtype).requires_grad_()
            for t in (case.a, case.b, *case.tables, *(torch.tensor(v) for v in values.values()))
        ]
        codes = case.a_codes.to(device), case.b_codes.to(device)
        placed = Case(*given[:2], *codes, given[2:4])
        out = placed.run(make(categories=2), **dict(zip(values, given[4:], strict=True)))
        total = (out * weights.to(device, dtype)).sum()
        found.append(torch.autograd.grad(total, given))
    for mine, right in zip(*found, strict=True):
        assert relative_error(mine, right) <= 2e-5


def test_gradients_are_the_same_each_time():
    case = on_gpu(700, 500, 5, (2, 3), torch.float32)
    found = []
    for _ in range(3):
        tables = torch.stack([t[:2, :2] for t in case.tables]).requires_grad_()
        given = case._replace(
            tables=tables, a_codes=case.a_codes.clamp(max=1), b_codes=case.b_codes.clamp(max=1)
        )
        given.run(kl.gaussian(categories=2), bandwidth=2.0).sum().backward()
        found.append(tables.grad)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("parts", (False, True))
def test_reductions(parts, monkeypatch):
    from kernlib.families.pairwise.reductions import blocks

    if parts:
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 4 * 200 * 64)
        monkeypatch.setattr(blocks, "MOST_ROWS", 64)
    case = on_gpu(300, 200, 5, (4, 7), torch.float32)
    descriptor, wanted = kl.gaussian(categories=2), torch.exp(-sums(case, 2) / 8)
    given, v = {**case.codes, "bandwidth": 2.0}, torch.randn(200, 3, device="cuda")
    found = kl.kernel_matmul(descriptor, case.a, case.b, v, **given)
    assert relative_error(found, wanted @ v.double().cpu()) <= 5e-6
    found = kl.kernel_logsumexp(descriptor, case.a, case.b, **given)
    assert relative_error(found, wanted.logsumexp(-1)) <= 2e-6
    found, places = kl.kernel_topk(descriptor, case.a, case.b, 3, True, **given)
    assert relative_error(found, wanted.topk(3).values) <= 2e-6
    assert relative_error(wanted.gather(-1, places.cpu()), wanted.topk(3).values) <= 1e-6
    place = kl.kernel_argmin(descriptor, case.a, case.b, **given)
    assert relative_error(wanted.gather(-1, place[:, None].cpu())[:, 0], wanted.amin(-1)) <= 2e-6


def test_gradients_of_products():
    found, drawn_v = [], torch.randn(200, 3, dtype=torch.float64)
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        case = drawn(300, 200, 5, (4, 7), torch.float32)
        tensors = case.a, case.b, *case.tables, drawn_v
        given = [t.to(device, dtype).requires_grad_() for t in tensors]
        codes = {"a_codes": case.a_codes.to(device), "b_codes": case.b_codes.to(device)}
        out = kl.kernel_matmul(
            kl.gaussian(categories=2), *given[:2], given[4], tables=given[2:4], bandwidth=2.0,
            **codes,
        )  # fmt: skip
        found.append(torch.autograd.grad(out.square().sum(), given))
    for mine, right in zip(*found, strict=True):
        assert relative_error(mine, right) <= 2e-5


def test_nothing_waits_and_a_graph_replays():
    case = on_gpu(300, 200, 5, (4, 4), torch.float32)
    case, descriptor = case._replace(tables=torch.stack(case.tables)), kl.gaussian(categories=2)
    out = case.run(descriptor, bandwidth=2.0)
    with nothing_waits():
        case.run(descriptor, bandwidth=2.0, out=out)
    with capture() as graph:
        case.run(descriptor, bandwidth=2.0, out=out)
    case.a_codes.copy_(3 - case.a_codes)
    graph.replay()
    assert torch.equal(out, case.run(descriptor, bandwidth=2.0))


def test_compiled_calls_are_the_same():
    case = on_gpu(130, 70, 5, (4, 3), torch.float32)
    run = torch.compile(lambda a: case._replace(a=a).run(kl.gaussian(categories=2), bandwidth=2.0),
                        fullgraph=True)  # fmt: skip
    assert torch.equal(run(case.a), case.run(kl.gaussian(categories=2), bandwidth=2.0))
