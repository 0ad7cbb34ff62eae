"""The kernels of a backward pass: derivatives of what follows the sums, against torch's, and
gradients that are products of matrices, against differences."""

import itertools

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.functions.agop import agop
from kernlib.families.pairwise.gradients import eager as autograd
from kernlib.families.pairwise.gradients import products, weights
from kernlib.runtime.plan import forget_plans
from tests.support import fakes

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


def magnitudes(descriptor, tensors, values, along):
    """The sums of |terms| that gradients are sums of: rounding is relative to these, and where the
    terms cancel, the gradient itself may be any number of times smaller."""
    k = kl.run_kernel(descriptor, *tensors, **values)
    leaves = (*tensors, *values.values())
    terms = [
        torch.autograd.grad(k, leaves, one.view_as(along) * along, retain_graph=True)
        for one in torch.eye(along.numel(), dtype=along.dtype)
    ]
    return [torch.stack(of_leaf).abs().sum(0) for of_leaf in zip(*terms, strict=True)]


@pytest.mark.parametrize("shape", [None, (), (L,)])
@pytest.mark.parametrize("case", CASES)
def test_row_35_kernels_compute_what_torch_does(case, shape, monkeypatch, seed):
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
def test_w8_values_below_epsilon_are_constants(case, how, monkeypatch, seed):
    descriptor, values = made(case, ())
    limit = 1.6 if how == "number" else torch.tensor(1.6, dtype=DOUBLE, requires_grad=True)
    a, b = points(M, K).requires_grad_(), points(N, K).requires_grad_()
    values["epsilon"] = limit
    found, wanted = both(monkeypatch, descriptor, (a, b), values, torch.randn(M, N, dtype=DOUBLE))
    assert_same(found, wanted)
    if how == "tensor":
        assert found[-1] == 0


@pytest.mark.parametrize("entries", [1 << 27, 1])
@pytest.mark.parametrize("case", [name for name in CASES if not CASES[name][0].signed])
def test_row_29_symmetric_kernels(case, entries, monkeypatch, seed):
    monkeypatch.setattr(autograd, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(autograd, "FEWEST_ROWS", 2)
    descriptor, values = made(case, (L,))
    descriptor = descriptor.replace(symmetric=True)
    a = points(M, K).requires_grad_()
    along = torch.randn(*((L,) if values else ()), M, M, dtype=DOUBLE)
    assert_same(*both(monkeypatch, descriptor, (a,), values, along))
    whole = gradients(descriptor.replace(symmetric=False), (a, a), values, along)
    found = gradients(descriptor, (a,), values, along)
    assert_same(found, (whole[0], *whole[2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_row_27_of_every_dtype(case, dtype, monkeypatch, seed):
    descriptor, values = made(case, (), torch.float32)
    a, b = points(M, K, dtype=dtype).requires_grad_(), points(N, K, dtype=dtype).requires_grad_()
    along = torch.randn(M, N).to(dtype)
    found, wanted = both(monkeypatch, descriptor, (a, b), values, along)
    assert [g.dtype for g in found] == [dtype, dtype, *(torch.float32 for _ in values)]
    gate = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs, size in zip(
        found, wanted, magnitudes(descriptor, (a, b), values, along), strict=True
    ):
        assert ((ours - theirs).abs() <= gate * (1 + size)).all()


@pytest.mark.parametrize("case", ["gaussian", "pq", "polynomial", "custom"])
def test_row_43_the_average_gradient_outer_product(case, monkeypatch, seed):
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


def test_the_exponent_of_the_outer_stage_selects_its_code():
    finish = lambda d, **values: weights.finish_of(d, values)[:1]  # noqa: E731
    outer = [finish(kl.p_distance(), p=p)[0] for p in (0, 0.5, 1, 2, 3, float("inf"))]
    assert outer == ["Identity", "Square", "Identity", "Sqrt", "Power", "Identity"]
    powers = kl.Pairwise(outer=stages.Power())
    outer = [finish(powers, outer_p=p)[0] for p in (0.5, 1.0, 2.0, 0.3, torch.tensor(1.0))]
    assert outer == ["Sqrt", "Identity", "Square", "Power", "Power"]
    p = torch.tensor([0.0, 4.0, float("inf")])
    assert weights.root_of(p).tolist() == [1.0, 0.25, 1.0]


def test_what_is_not_asked_for_is_not_computed(monkeypatch, seed):
    seen = []
    real = weights.derivative
    monkeypatch.setattr(
        weights,
        "derivative",
        lambda made, slope, *rest: seen.append(slope.by) or real(made, slope, *rest),
    )
    for place, by in enumerate((["v"], ["v"], ["v", "exponent"], ["q"], ["bandwidth"], [])):
        values = {"p": 1.4, "q": 0.8, "bandwidth": 3.0, "regularization": 0.1}
        tensors = [points(M, K), points(N, K)]
        tensors += [torch.tensor(v, dtype=DOUBLE) for v in values.values()]
        tensors[place].requires_grad_()
        given = dict(zip(values, tensors[2:], strict=True))
        kl.run_kernel(kl.laplace_pq(), *tensors[:2], **given).sum().backward()
        assert seen == by
        seen.clear()


def test_sums_of_two_matrices(seed):
    for shape, dtype in itertools.product(((M, N), (1, M, N), (L, M, N)), (DOUBLE, torch.float32)):
        x, y = torch.randn(shape, dtype=DOUBLE), torch.randn(shape, dtype=DOUBLE).to(dtype)
        wanted = (x * y).sum((-2, -1))
        found = weights.contracted(x.clone(), y)
        torch.testing.assert_close(found, wanted.view(found.shape))
        turned = weights.contracted(x.mT.contiguous().mT, y)
        torch.testing.assert_close(turned, wanted.view(turned.shape))
        wide = weights.contracted(x[..., :1, :].clone(), y)  # of another shape
        torch.testing.assert_close(wide, (x[..., :1, :] * y).sum((-2, -1)))


# Products of matrices.


@pytest.mark.parametrize("columns", [1, 63, 64, 100])
@pytest.mark.parametrize("batch", [(), (1,), (L,)])
def test_w6_squares_are_those_of_differences_far_from_the_origin(batch, columns, seed):
    x = (torch.randn(*batch, M, columns, dtype=DOUBLE) + 1e3).float()
    z = (torch.randn(*batch, N, columns, dtype=DOUBLE) + 1e3).float()
    given = torch.randn(*batch, M, N)
    wide = [t.double() for t in (x, z, given)]
    wanted = 2 * (wide[2][..., None] * (wide[0][..., None, :] - wide[1][..., None, :, :])).sum(-2)
    found = products.squares(None, x, z, given)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(products.dots(None, z, given), given @ z)


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
    monkeypatch.setattr(autograd, "FEWEST", 1)
    assert_same(gradients(descriptor, (a, b), values, along), wanted, rtol=1e-4, atol=1e-5)
    assert len(seen) == 2


def test_only_what_takes_memory_is_computed_by_blocks(monkeypatch, seed):
    monkeypatch.setattr(autograd, "BLOCK_ENTRIES", 2 * N)
    monkeypatch.setattr(autograd, "FEWEST_ROWS", 2)
    seen, real = [], autograd.points_gradient
    monkeypatch.setattr(autograd, "points_gradient", lambda *given: seen.append(1) or real(*given))
    for descriptor, calls in (
        (kl.l1_distance(), 2),
        (kl.squared_distance(), M),  # 2 in each block of 2 rows
        (kl.l2_distance(), M),
    ):
        a, b = points(M, K).requires_grad_(), points(N, K).requires_grad_()
        gradients(descriptor, (a, b), {}, torch.randn(M, N, dtype=DOUBLE))
        assert len(seen) == calls
        seen.clear()


@pytest.fixture
def gpus(monkeypatch):
    fakes.forget()
    yield fakes.install(monkeypatch)
    fakes.forget()


PARTS = {  # rows, terms, columns: parts
    (10000, 10000, 129): 5,  # 79 tiles of 132 at a time: 395 fill them three times over
    (30000, 4096, 129): 1,
    (4480, 30000, 129): 10,
    (100, 999, 129): 1,
    (100, 9999, 129): 1,
    (40000, 10000, 192): 2,
}


@pytest.mark.parametrize("sizes", PARTS)
def test_long_sums_are_split_until_they_fill_a_gpu(sizes, gpus):
    rows, terms, columns = sizes
    left = torch.empty(1, device="meta").expand(rows, terms)
    right = torch.empty(1, device="meta").expand(terms, columns)
    left.get_device = lambda: 0
    assert products.parts_of(left, right) == PARTS[sizes]


@pytest.mark.parametrize("batch", [(), (1,)])
def test_a_product_in_parts_is_the_product(batch, monkeypatch, seed):
    left = torch.randn(*batch, 12, 7).mT
    right = torch.randn(*batch, 5, 12).mT
    monkeypatch.setattr(products, "is_torchs", lambda *given: False)
    for parts in (1, 2, 6):
        monkeypatch.setattr(products, "parts_of", lambda *given, parts=parts: parts)
        torch.testing.assert_close(products.multiplied("fp32", left, right), left @ right)


def test_who_computes_a_product(monkeypatch):
    on_gpu = torch.empty(4, 4, device="meta")
    decide = lambda precision, width: products.is_torchs(precision, on_gpu, width)  # noqa: E731
    for setting, wanted in (
        ("highest", {None: (True, False), "fp32": (True, False), "tf32": (True, False)}),
        ("high", {None: (True, True), "fp32": (False, False), "tf32": (True, True)}),
    ):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        for precision, answers in wanted.items():
            assert (decide(precision, 127), decide(precision, 128)) == answers
    assert products.is_torchs("fp32", torch.empty(4, 4), 1000)
    assert products.is_torchs("fp32", torch.empty(4, 4, dtype=DOUBLE, device="meta"), 1000)
