"""Reductions of matrices with categories, against those of the matrix itself."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.categories import operation
from kernlib.families.pairwise.reductions import blocks
from tests.families.pairwise.categories.cases import drawn

CASE = drawn(11, 9, 4, (3, 5))
LAPLACE = kl.laplace_pq(categories=2)
VALUES = {"p": 1.3, "bandwidth": 2.0, "q": 0.9}
V = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def matmul(v):
    return lambda *given, **values: kl.kernel_matmul(*given, v, **values)


def topk(k, largest=False):
    return lambda *given, **values: kl.kernel_topk(*given, k, largest, **values)


REDUCTIONS = {  # by kernlib, and of the matrix
    "matmul": (matmul(V), lambda m: m @ V),
    "vector": (matmul(V[:, 0]), lambda m: m @ V[:, 0]),
    "sum": (kl.kernel_sum, lambda m: m.sum(-1)),
    "logsumexp": (kl.kernel_logsumexp, lambda m: m.logsumexp(-1)),
    "potential": (
        lambda *given, **values: kl.kernel_logsumexp(*given, col_potential=V[:, 0], **values),
        lambda m: (m + V[:, 0]).logsumexp(-1),
    ),
    "min": (kl.kernel_min, lambda m: tuple(m.min(-1))),
    "argmin": (kl.kernel_argmin, lambda m: m.argmin(-1)),
    "topk": (topk(4), lambda m: tuple(m.topk(4, largest=False))),
    "largest": (topk(1, True), lambda m: tuple(m.topk(1))),
}


def called(reduce, case, descriptor, **values):
    return reduce(descriptor, case.a, case.b, **case.codes, **values)


def same(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.fixture(params=[None, 7, 40], ids=["whole", "parts of rows", "rows"])
def entries(request, monkeypatch):
    """Of a block, forwards and backwards."""
    if request.param:
        monkeypatch.setattr(blocks, "entries_of", lambda *given: request.param)
        monkeypatch.setattr(blocks, "MOST_ROWS", 2)
        monkeypatch.setattr(operation, "BLOCK_ENTRIES", request.param)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_values(name, entries):
    reduce, of_matrix = REDUCTIONS[name]
    same(called(reduce, CASE, LAPLACE, **VALUES), of_matrix(CASE.run(LAPLACE, **VALUES)))


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name != "argmin"])
def test_gradients(name, entries):
    reduce, of_matrix = REDUCTIONS[name]
    found = []
    for by in (True, False):
        given = [t.clone().requires_grad_() for t in (CASE.a, CASE.b, *CASE.tables)]
        bandwidth = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        case = CASE._replace(a=given[0], b=given[1], tables=given[2:])
        values = VALUES | {"bandwidth": bandwidth}
        made = called(reduce, case, LAPLACE, **values) if by else of_matrix(
            case.run(LAPLACE, **values))  # fmt: skip
        made = made[0] if isinstance(made, tuple) else made
        weights = torch.arange(1.0, made.numel() + 1).double().view(made.shape)
        found.append(torch.autograd.grad((made * weights).sum(), (*given, bandwidth)))
    for mine, right in zip(*found, strict=True):
        same(mine, right)


def test_gradients_by_v_and_of_gradients():
    def call(a, v, table):
        case = CASE._replace(a=a, tables=[CASE.tables[0], table])
        return called(matmul(v), case, kl.gaussian(categories=2), bandwidth=2.0)

    given = tuple(t.clone().requires_grad_() for t in (CASE.a, V, CASE.tables[1]))
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def batch(m=11, n=9, k=4) -> tuple:
    cases = [drawn(m, n, k, (4, 4), seed=seed) for seed in (1, 2, 3)]
    each = {name: torch.stack([getattr(c, name) for c in cases]) for name in cases[0]._fields[:4]}
    return cases, each | {"tables": torch.stack([torch.stack(c.tables) for c in cases])}


@pytest.mark.parametrize("name", ["a", "b", "a_codes", "b_codes", "tables", "v"])
def test_batches(name, entries):
    cases, each = batch()
    v, descriptor = torch.stack([V, 2 * V, -V]), kl.gaussian(categories=2)
    whole = cases[0] if name == "v" else cases[0]._replace(**{name: each[name]})
    found = called(matmul(v if name == "v" else V), whole, descriptor, bandwidth=2.0)
    assert found.shape == (3, 11, 3)
    for l, case in enumerate(cases):
        one = cases[0] if name == "v" else cases[0]._replace(**{name: getattr(case, name)})
        same(found[l], one.run(descriptor, bandwidth=2.0) @ (v[l] if name == "v" else V))
    nearest = called(topk(3), whole, descriptor, bandwidth=2.0)
    assert nearest[0].shape == ((11, 3) if name == "v" else (3, 11, 3))


@pytest.mark.parametrize("name", ["a", "b_codes", "tables", "v", "bandwidth"])
def test_gradients_of_batches(name):
    cases, each = batch(4, 3, 2)
    v = torch.stack([V[:3], 2 * V[:3], -V[:3]]) if name == "v" else V[:3]
    widths = torch.tensor([1.0, 2.0, 3.0]).double()
    bandwidth = widths.view(3, 1, 1) if name == "bandwidth" else 2.0
    whole = cases[0]._replace(**{name: each[name]}) if name in each else cases[0]
    descriptor = kl.gaussian(categories=2)

    def call(a, b, v):
        return called(matmul(v), whole._replace(a=a, b=b), descriptor, bandwidth=bandwidth)

    def chosen(a, b):
        case = whole._replace(a=a, b=b)
        return called(topk(2), case, descriptor, bandwidth=bandwidth)[0]

    given = tuple(t.clone().requires_grad_() for t in (whole.a, whole.b, v))
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradcheck(chosen, given[:2])


def test_out_and_the_diagonal():
    out, case = torch.zeros(9, 3, dtype=torch.float64), CASE._replace(a=CASE.a[:9])
    case = case._replace(a_codes=case.a_codes[:9])
    values = {"bandwidth": 2.0, "regularization": 0.5, "row_offset": 1}
    found = kl.kernel_matmul(
        kl.gaussian(categories=2), case.a, case.b, V, out=out, **case.codes, **values
    )
    assert found is out
    same(out, case.run(kl.gaussian(categories=2), **values) @ V)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_types(dtype):
    case, v = drawn(11, 9, 4, (3, 5), dtype), V.to(dtype).requires_grad_()
    found = called(matmul(v), case, kl.gaussian(categories=2), bandwidth=2.0)
    wide = case._replace(a=case.a.double(), b=case.b.double(), tables=[
        table.double() for table in case.tables])  # fmt: skip
    wanted = wide.run(kl.gaussian(categories=2), bandwidth=2.0) @ V.to(dtype).double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)
    found.sum().backward()
    assert v.grad.dtype == dtype


def test_far_bandwidths_are_not_taken_into_points():
    """Reductions scale points to a bandwidth whose square has no reciprocal; tables have none."""
    case = CASE._replace(tables=[table * 1e40 for table in CASE.tables])
    found = called(kl.kernel_sum, case, kl.gaussian(categories=2), bandwidth=1e20)
    same(found, case.run(kl.gaussian(categories=2), bandwidth=1e20).sum(-1))


def test_a_lengthscale():
    scale = torch.rand(4, dtype=torch.float64) + 0.5
    found = called(kl.kernel_sum, CASE, kl.gaussian(categories=2), lengthscale=scale)
    same(found, CASE.run(kl.gaussian(categories=2), lengthscale=scale).sum(-1))


def test_no_points_in_b():
    case = drawn(4, 0, 3, (3,))
    descriptor = kl.gaussian(categories=1)
    assert torch.equal(called(kl.kernel_sum, case, descriptor, bandwidth=1.0), torch.zeros(4))
    with pytest.raises(ValueError, match="at least one point in b"):
        called(kl.kernel_min, case, descriptor, bandwidth=1.0)
    with pytest.raises(ValueError, match="k must be from 1 to the 0 points of b"):
        called(topk(1), case, descriptor, bandwidth=1.0)


def test_what_is_wrong_is_said():
    def refused(kind, words, reduce=kl.kernel_sum, case=CASE, **values):
        with pytest.raises(kind, match=words):
            called(reduce, case, kl.gaussian(categories=2), **{"bandwidth": 2.0, **values})

    refused(ValueError, "v must have a row for each of the 9 points of b", matmul(V[:4]))
    refused(ValueError, "bandwidth must be greater than 0", bandwidth=0.0)
    refused(ValueError, "k must be from 1 to the 9 points", topk(10))
    refused(TypeError, "a has no memory", case=CASE._replace(a=CASE.a.to("meta")))
    refused(ValueError, "a row for each of the 11 points of a",
            case=CASE._replace(a_codes=CASE.b_codes))  # fmt: skip
    with pytest.raises(TypeError, match="needs tables: the call is run_kernel"):
        kl.kernel_sum(kl.gaussian(categories=2), CASE.a, CASE.b, a_codes=CASE.a_codes,
                      b_codes=CASE.b_codes, bandwidth=2.0)  # fmt: skip
    a, out = CASE.a.clone().requires_grad_(), torch.zeros(11, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="a requires a gradient"):
        kl.kernel_matmul(kl.gaussian(categories=2), a, CASE.b, V, out=out, **CASE.codes,
                         bandwidth=2.0)  # fmt: skip


def test_compiled_functions_leave_their_graph():
    run = torch.compile(
        lambda v: called(matmul(2 * v), CASE, LAPLACE, **VALUES) + 1, backend="aot_eager"
    )
    same(run(V), CASE.run(LAPLACE, **VALUES) @ (2 * V) + 1)
