"""The kernels of a backward pass: derivatives of what follows the sums, against torch's, and
gradients that are products of matrices, against differences."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.functions.agop import agop
from kernlib.families.pairwise.gradients import backward, products, weights
from kernlib.runtime.plan import forget_plans

M, N, K, L = 6, 5, 3, 2
DOUBLE = torch.float64
CASES = {  # descriptor, hyperparameters
    "l2": (kl.l2_distance(), {}),
    "p": (kl.p_distance(), {"p": 1.3}),
    "small p": (kl.p_distance(), {"p": 0.5}),
    "laplace": (kl.laplace_l1(), {"bandwidth": 3.0, "regularization": 0.5}),
    "laplace l2": (kl.laplace_l2(), {"bandwidth": 2.0}),
    "gaussian": (kl.gaussian(), {"bandwidth": 2.0, "regularization": 0.5}),
    "matern": (kl.matern52(), {"bandwidth": 2.0}),
    "rational": (kl.rational_quadratic(), {"bandwidth": 2.0, "alpha": 0.8}),
    "pq": (kl.laplace_pq(), {"p": 1.4, "q": 0.8, "bandwidth": 3.0}),
    "pq, p = 2": (kl.laplace_pq(), {"p": 2.0, "q": 0.8, "bandwidth": 3.0}),
    "pq, q = 1": (kl.laplace_pq(), {"p": 1.4, "q": 1.0, "bandwidth": 3.0}),
    "polynomial": (kl.polynomial(2), {"gamma": 0.5, "offset": 1.0}),
    "powers": (
        kl.Pairwise(inner=stages.Power(), outer=stages.Power(), epilogue=kl.Scale()),
        {"inner_p": 1.5, "outer_p": 0.7, "scale": 2.0},
    ),
    "exponential": (
        kl.Pairwise(inner=stages.ExpPower(), epilogue=kl.Tanh()),
        {"p": 1.5, "inner_scale": -0.7},
    ),
    "square": (kl.l1_distance(outer=stages.Square(), epilogue=kl.Laplace()), {"bandwidth": 9.0}),
    "absolute": (
        kl.Pairwise(inner=stages.Identity(), outer=stages.Abs(), epilogue=kl.Silu()), {},
    ),
    "custom": (
        kl.l1_distance(epilogue=(kl.Custom("limit * v ** exponent", ("limit", "exponent")),
                                 kl.Custom("max(v, 1) + min(v, 2)"))),
        {"limit": 0.5, "exponent": 1.2},
    ),
}  # fmt: skip


def points(*shape, dtype=DOUBLE):
    """Some pairs of them equal."""
    return torch.randint(-2, 3, shape).to(dtype) + 0.0


def gradients(descriptor, tensors, values, along, **offsets):
    k = kl.run_kernel(descriptor, *tensors, **values, **offsets)
    leaves = (*tensors, *(v for v in values.values() if isinstance(v, torch.Tensor)))
    return torch.autograd.grad(k, leaves, along, allow_unused=True)


def both(monkeypatch, *arguments, **offsets):
    """The gradients by kernels, and by torch."""
    found = gradients(*arguments, **offsets)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "has_kernels", lambda finish: False)
        patch.setattr(weights, "derivative", None)
        forget_plans()  # and with them that there are kernels
        wanted = gradients(*arguments, **offsets)
    forget_plans()
    return found, wanted


def made(case, shape, dtype=DOUBLE):
    descriptor, values = CASES[case]
    tensors = {
        name: torch.full(shape, value, dtype=dtype) * (torch.arange(value_count(shape)) + 4) / 4
        for name, value in values.items()
    }
    return descriptor, {name: t.view(shape).requires_grad_() for name, t in tensors.items()}


def value_count(shape):
    return shape[0] if shape else 1


def assert_same(found, wanted, **tolerance):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)


@pytest.mark.parametrize("shape", [None, (), (L,)])
@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_torch_does(case, shape, monkeypatch, seed):
    descriptor, values = CASES[case]
    if shape is not None:
        descriptor, values = made(case, shape)
    batch = (L,) if shape else ()
    a, b = points(M, K).requires_grad_(), points(*batch, N, K).requires_grad_()
    along = torch.randn(*batch, M, N, dtype=DOUBLE)
    offsets = {"row_offset": 3, "col_offset": 1}
    assert_same(*both(monkeypatch, descriptor, (a, b), values, along, **offsets))


@pytest.mark.parametrize("how", ["number", "tensor"])
@pytest.mark.parametrize("case", [name for name in CASES if CASES[name][0].epilogue])
def test_values_below_epsilon_are_constants(case, how, monkeypatch, seed):
    descriptor, values = made(case, ())
    limit = 1.6 if how == "number" else torch.tensor(1.6, dtype=DOUBLE, requires_grad=True)
    a, b = points(M, K).requires_grad_(), points(N, K).requires_grad_()
    values["epsilon"] = limit
    found, wanted = both(monkeypatch, descriptor, (a, b), values, torch.randn(M, N, dtype=DOUBLE))
    assert_same(found, wanted)
    if how == "tensor":
        assert found[-1] == 0


@pytest.mark.parametrize("case", ["gaussian", "pq", "polynomial", "custom"])
def test_the_average_gradient_outer_product(case, monkeypatch, seed):
    descriptor, values = CASES[case]
    if case == "gaussian":
        values = {"bandwidth": torch.tensor([2.0, 3.0], dtype=DOUBLE)}
    x, z, c = points(M, K), points(N, K), torch.randn(2, N, dtype=DOUBLE)
    found = agop(descriptor, x, z, c, **values)
    monkeypatch.setattr(weights, "has_kernels", lambda finish: False)
    assert_same([found], [agop(descriptor, x, z, c, **values)])


def test_long_chains_are_left_to_torch(seed):
    chain = (kl.Silu(), kl.Tanh(), kl.Silu(), kl.Silu())
    descriptor = kl.squared_distance(epilogue=chain)
    assert not weights.has_kernels(weights.finish_of(descriptor, {}))
    a, b = points(M, K).requires_grad_(), points(N, K).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: kl.run_kernel(descriptor, a, b), (a, b))


def test_what_is_not_asked_for_is_not_computed(monkeypatch, seed):
    seen = []
    real = weights.of_norms
    monkeypatch.setattr(
        weights, "of_norms", lambda slope, *rest: seen.append(slope.by) or real(slope, *rest)
    )
    for place, by in enumerate((["v"], ["v"], ["v"], ["q"], ["bandwidth"], [])):
        values = {"p": 1.4, "q": 0.8, "bandwidth": 3.0, "regularization": 0.1}
        tensors = [points(M, K), points(N, K)]
        tensors += [torch.tensor(v, dtype=DOUBLE) for v in values.values()]
        tensors[place].requires_grad_()
        given = dict(zip(values, tensors[2:], strict=True))
        kl.run_kernel(kl.laplace_pq(), *tensors[:2], **given).sum().backward()
        assert seen == by
        seen.clear()


# Products of matrices.


@pytest.mark.parametrize("columns", [1, 63, 64, 100])
@pytest.mark.parametrize("batch", [(), (1,), (L,)])
def test_squares_are_those_of_differences_far_from_the_origin(batch, columns, seed):
    x = (torch.randn(*batch, M, columns, dtype=DOUBLE) + 1e3).float()
    z = (torch.randn(*batch, N, columns, dtype=DOUBLE) + 1e3).float()
    given = torch.randn(*batch, M, N)
    wide = [t.double() for t in (x, z, given)]
    wanted = 2 * (wide[2][..., None] * (wide[0][..., None, :] - wide[1][..., None, :, :])).sum(-2)
    found = products.squares(None, x, z, given)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(products.dots(None, z, given), given @ z)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sets", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_products_of_points_are_sums_over_differences(batch, sets, accumulate, turned, seed):
    x, z = torch.randn(batch, M, K, dtype=DOUBLE), torch.randn(1, N, K, dtype=DOUBLE) + 50.0
    given, c = torch.randn(1, M, N, dtype=DOUBLE), torch.randn(1, sets, N, dtype=DOUBLE)
    before = torch.randn(batch, max(1, sets), M, K, dtype=DOUBLE)
    target = before.clone()
    laid = given.mT.contiguous().mT if turned else given
    products.weighted_squares(target, x, z, laid, c if sets else None, -2.5, accumulate)
    each = c if sets else torch.ones(1, 1, N, dtype=DOUBLE)
    whole = each[:, :, None] * given[:, None]
    wanted = -2.5 * (whole[..., None] * (x[:, :, None] - z[:, None])[:, None]).sum(-2)
    torch.testing.assert_close(target, wanted + before if accumulate else wanted)


def test_an_infinite_coordinate_spoils_no_other_column(seed):
    x, z, given = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    z[1, 2] = torch.inf
    found = products.squares(None, x, z, given)
    assert found[:, :2].isfinite().all()


@pytest.mark.parametrize("case", ["gaussian", "l2"])
def test_large_calls_take_products(case, monkeypatch, seed):
    descriptor, values = CASES[case]
    a, b = (torch.randn(rows, K).requires_grad_() for rows in (M, N))
    along = torch.randn(M, N)
    wanted = gradients(descriptor, (a, b), values, along)
    seen, real = [], products.squares
    monkeypatch.setattr(products, "squares", lambda *given: seen.append(1) or real(*given))
    monkeypatch.setattr(products, "FEWEST", 1)
    assert_same(gradients(descriptor, (a, b), values, along), wanted, rtol=1e-4, atol=1e-5)
    assert len(seen) == 2


def test_only_what_takes_memory_is_computed_by_blocks(monkeypatch, seed):
    monkeypatch.setattr(backward, "BLOCK_ENTRIES", 2 * N)
    monkeypatch.setattr(backward, "FEWEST_ROWS", 2)
    seen, real = [], backward.points_gradient
    monkeypatch.setattr(backward, "points_gradient", lambda *given: seen.append(1) or real(*given))
    for descriptor, calls in (
        (kl.l1_distance(), 2),
        (kl.squared_distance(), M),  # 2 in each block of 2 rows
        (kl.l2_distance(), M),
    ):
        a, b = points(M, K).requires_grad_(), points(N, K).requires_grad_()
        gradients(descriptor, (a, b), {}, torch.randn(M, N, dtype=DOUBLE))
        assert len(seen) == calls
        seen.clear()
