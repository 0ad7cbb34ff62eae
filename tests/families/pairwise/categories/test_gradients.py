"""Gradients of matrices with categories: by points, tables and hyperparameters."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.categories import operation
from kernlib.families.pairwise.stages_reference import finish
from tests.families.pairwise.categories.cases import drawn
from tests.support.speeds import slow_but

CASE = drawn(7, 6, 4, (3, 1, 5))
KERNELS = {
    "l1": (kl.l1_distance, {}),
    "squared": (kl.squared_distance, {}),
    "norm": (kl.p_distance, {"p": 1.4}),
    "gaussian": (kl.gaussian, {"bandwidth": 2.0}),
    "laplace": (kl.laplace_l2, {"bandwidth": 2.0}),
    "matern": (kl.matern52, {"bandwidth": 2.0}),
    "pq": (kl.laplace_pq, {"p": 1.4, "bandwidth": 2.0, "q": 0.8}),
    "polynomial": (kl.polynomial, {"gamma": 0.3, "offset": 1.2}),
    "power sum": (kl.exp_power_sum, {"p": 1.4, "inner_scale": -0.5}),
}


def leaf(value) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).clone().requires_grad_()


def leaves(case, values: dict) -> tuple:
    return tuple(map(leaf, (case.a, case.b, *case.tables, *values.values())))


def called(case, descriptor, names):
    count = len(case.tables)

    def call(a, b, *rest):
        given = case._replace(a=a, b=b, tables=list(rest[:count]))
        return given.run(descriptor, **dict(zip(names, rest[count:], strict=True)))

    return call


@pytest.mark.parametrize("name", slow_but(["l1", "gaussian", "pq"], KERNELS))
def test_gradients_of_everything(name):
    make, values = KERNELS[name]
    call = called(CASE, make(categories=3), values)
    assert torch.autograd.gradcheck(call, leaves(CASE, values))


@pytest.mark.parametrize("name", slow_but(["squared"], ["squared", "pq"]))
def test_gradients_of_gradients(name):
    make, values = KERNELS[name]
    case = drawn(3, 2, 2, (2, 3))
    call = called(case, make(categories=2), values)
    assert torch.autograd.gradgradcheck(call, leaves(case, values))


def test_gradients_of_batches():
    cases = [drawn(5, 4, 3, (3, 3), seed=seed) for seed in (1, 2)]
    codes = torch.stack([case.a_codes for case in cases])
    tables = torch.stack([torch.stack(case.tables) for case in cases])
    bandwidth = torch.tensor([1.5, 2.5])

    def call(a, b, tables, bandwidth):
        given = cases[0]._replace(a=a, b=b, a_codes=codes, tables=tables)
        return given.run(kl.laplace_l2(categories=2), bandwidth=bandwidth)

    given = (cases[0].a, cases[0].b[None], tables, bandwidth)
    assert torch.autograd.gradcheck(call, tuple(map(leaf, given)))


def formula(case, values):
    """By torch alone."""
    descriptor = kl.laplace_pq()
    s = (case.a[:, None] - case.b).abs().pow(values["p"]).sum(-1)
    for c, table in enumerate(case.tables):
        s = s + table[case.a_codes[:, c]][:, case.b_codes[:, c]]
    return finish(descriptor, s[None], values, root=True)[0]


@pytest.mark.parametrize("entries", [1, 13, 1 << 20])
def test_blocks_of_rows_add_up(entries, monkeypatch):
    monkeypatch.setattr(operation, "BLOCK_ENTRIES", entries)
    weights = torch.rand(7, 6, dtype=torch.float64)
    found, wanted = [], []
    for into in (found, wanted):
        a, b, *rest = leaves(CASE, {"p": 1.3, "bandwidth": 2.0, "q": 0.9})
        case = CASE._replace(a=a, b=b, tables=rest[:3])
        values = dict(zip(("p", "bandwidth", "q"), rest[3:], strict=True))
        made = formula(case, values) if into is wanted else case.run(
            kl.laplace_pq(categories=3), **values)  # fmt: skip
        into += torch.autograd.grad((made * weights).sum(), (a, b, *rest))
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_block_finds_its_diagonal_in_the_backward_pass(monkeypatch):
    monkeypatch.setattr(operation, "BLOCK_ENTRIES", 1)
    regularization = leaf(0.5)
    given = {"bandwidth": 2.0, "regularization": regularization, "row_offset": 2}
    CASE.run(kl.gaussian(categories=3), **given).sum().backward()
    assert regularization.grad.item() == 4  # of (0, 2) to (3, 5)


@pytest.mark.parametrize("kind", ["a", "b", "tables", "bandwidth"])
def test_one_gradient_alone(kind):
    given = {"a": CASE.a, "b": CASE.b, "tables": CASE.tables[2], "bandwidth": 2.0}
    one = leaf(given[kind])
    given[kind] = one
    case = CASE._replace(a=given["a"], b=given["b"], tables=[*CASE.tables[:2], given["tables"]])
    out = case.run(kl.gaussian(categories=3), bandwidth=given["bandwidth"])
    out.sum().backward()
    assert one.grad.shape == one.shape and one.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_have_the_dtype_of_their_tensors(dtype):
    case = drawn(9, 8, 3, (4, 4), dtype)
    a, tables = case.a.clone().requires_grad_(), torch.stack(case.tables).float().requires_grad_()
    given = case._replace(a=a, tables=tables)
    given.run(kl.gaussian(categories=2), bandwidth=2.0).sum().backward()
    wide = drawn(9, 8, 3, (4, 4))
    a64, tables64 = (t.detach().double().requires_grad_() for t in (a, tables))
    exact = wide._replace(a=a64, b=case.b.double(), tables=tables64)
    exact.run(kl.gaussian(categories=2), bandwidth=2.0).sum().backward()
    assert (a.grad.dtype, tables.grad.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(a.grad.double(), a64.grad, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(tables.grad.double(), tables64.grad, rtol=2e-3, atol=2e-3)


def test_equal_points_with_tables_of_zeros_add_nothing():
    a = CASE.a.clone().requires_grad_()
    case = CASE._replace(a=a, b=CASE.a, b_codes=CASE.a_codes)
    zeros = case._replace(tables=[torch.zeros_like(table) for table in case.tables])
    out = zeros.run(kl.l2_distance(categories=3))
    out.diagonal().sum().backward()
    assert torch.equal(a.grad, torch.zeros_like(a))


def test_empty_ones_have_gradients_of_zeros():
    case = drawn(0, 5, 3, (4,))
    b, table = case.b.clone().requires_grad_(), leaf(case.tables[0])
    case._replace(b=b, tables=[table]).run(kl.l2_distance(categories=1)).sum().backward()
    assert torch.equal(b.grad, torch.zeros(5, 3)) and not table.grad.any()
