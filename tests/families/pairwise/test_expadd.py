"""Sums of exponentials, the stage of logarithms and the gradient of powers of sums, on CPU tensors
against plain float64."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

import kernlib as kl
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.descriptor import exp_power_sum
from kernlib.families.pairwise.functions.expadd import cdist_expadd, cdist_grad_expadd
from tests.families.pairwise.cases import draw

M, N, K, L, O = 6, 7, 5, 3, 2
INF, NAN = math.inf, math.nan
LOGS = kl.Pairwise(inner=stages.PowerLog())


def differences(a, b):
    return (b.double().unsqueeze(-3) - a.double().unsqueeze(-2)).abs()


# Values.


@pytest.mark.parametrize("p", [0.7, 1, 2])
def test_a_lengthscale_stands_for_a_scale(p):
    a, b = draw(M, K), draw(N, K, seed=1)
    expected = cdist_expadd(a, b, p=p, scale=-(0.6**-p))
    assert torch.equal(cdist_expadd(a, b, p=p, lengthscale=0.6), expected)
    for given in ({"lengthscale": torch.tensor(0.6)}, {"lengthscale": torch.tensor([0.6] * L)}):
        found = cdist_expadd(a, b, p=p, **given)
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-6, atol=1e-6)


def test_exponents_and_scales_of_a_batch_are_a_loop_over_its_entries():
    a, b = draw(M, K), draw(L, N, K, seed=1)
    p, scale = torch.tensor([0.5, 1.0, 1.7]), torch.tensor([-1.0, -0.3, 0.2])
    found = cdist_expadd(a, b, p=p, scale=scale)
    for l in range(L):
        one = cdist_expadd(a, b[l], p=p[l].item(), scale=scale[l].item())
        torch.testing.assert_close(found[l], one)


def test_p_of_zero_asks_whether_coordinates_differ():
    a, b = torch.tensor([[0.0, 1.0, NAN]]), torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 1.0]])
    found = cdist_expadd(a[:, :2], b[:, :2], p=0, scale=-1.0)
    torch.testing.assert_close(found, torch.tensor([[1 + math.exp(-1), 1 + math.exp(-1)]]))
    assert cdist_expadd(a, b, p=0, scale=-1.0).isnan().all()


def test_no_features_give_an_empty_sum():
    assert torch.equal(cdist_expadd(draw(M, 0), draw(N, 0), scale=-1.0), draw(M, N) * 0)
    assert cdist_expadd(draw(0, K), draw(N, K), scale=-1.0).shape == (0, N)


def test_the_stage_takes_epilogues_and_an_outer_power_of_its_own():
    a, b = draw(M, K), draw(N, K, seed=1)
    made = exp_power_sum(outer=kl.Power(), epilogue=kl.Scale("gain"))
    found = kl.run_kernel(made, a, b, p=1.3, inner_scale=-0.5, outer_p=0.7, gain=3.0)
    s = torch.exp(-0.5 * differences(a, b) ** 1.3).sum(-1)
    torch.testing.assert_close(found, 3 * s**0.7)
    symmetric = kl.run_kernel(exp_power_sum(symmetric=True), a, p=1.3, inner_scale=-0.5)
    assert torch.equal(symmetric, symmetric.mT)
    torch.testing.assert_close(symmetric, cdist_expadd(a, a, p=1.3, scale=-0.5))


def test_no_numbers_give_no_sums():
    a, none = torch.ones(2, 3), torch.ones(0)
    for given in ({"lengthscale": none}, {"scale": none}, {"lengthscale": none, "p": 1.5}):
        assert kl.cdist_expadd(a, a, **given).shape == (0, 2, 2)
    found = kl.cdist_grad_expadd(*[torch.ones(2, 2)] * 4, lengthscale=none)
    assert found.numel() == 0 and found.shape[0] == 0


def test_an_out_is_written_in_place():
    a, b = draw(M, K), draw(N, K, seed=1)
    out = torch.full((N, M), NAN, dtype=torch.float64).mT
    assert cdist_expadd(a, b, out=out, scale=-1.0) is out
    torch.testing.assert_close(out, cdist_expadd(a, b, scale=-1.0))


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.3, 2])
def test_logarithms_are_the_derivative_of_a_power_by_its_exponent(p):
    a, b = draw(M, K), draw(N, K, seed=1)
    b[3] = a[2]
    found = kl.run_kernel(LOGS, a, b, p=p)
    v = differences(a, b)
    expected = torch.where(v == 0, 0.0, v**p * v.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(found, expected)
    assert found[2, 3] == 0
    if p:
        above, below = (kl.cdist(a, b, p=p + step, root=False) for step in (1e-6, -1e-6))
        torch.testing.assert_close(found, (above - below) / 2e-6, rtol=1e-6, atol=1e-6)


def test_a_nan_stays_one_among_logarithms():
    a, b = draw(M, K), draw(N, K, seed=1)
    a[1, 0] = NAN
    found = kl.run_kernel(LOGS, a, b, inner_p=torch.tensor(1.3))
    assert found[1].isnan().all() and not found[2:].isnan().any()


# Gradients of (c0 + S)^q.


def gradient(a, b, c, d, p, q, c0, scale):
    """By autograd, for p of 1 or greater."""
    d = d.double().clone().requires_grad_()
    v = (d.unsqueeze(-2) - b.double().unsqueeze(-1)).abs()  # (N, K, M)
    s = torch.exp(scale * v**p).sum(-3)
    rows = []
    for one in c.double().unbind(-2):
        value = (one.unsqueeze(-1) * a.double() * (c0 + s) ** q).sum()
        rows.append(torch.autograd.grad(value, d, retain_graph=True)[0])
    return torch.stack(rows, -3)


def problem(*batch, dtype=torch.float64):
    """a, b, c, d with K, N, O and M of 8, 5, 2 and 6."""
    sizes = {"a": (8, 6), "b": (5, 8), "c": (2, 8), "d": (5, 6)}
    return [draw(*batch, *size, seed=i, dtype=dtype) for i, size in enumerate(sizes.values())]


@pytest.mark.parametrize("p", [1, 1.3, 2])
@pytest.mark.parametrize(("q", "c0"), [(1.0, 0.0), (0.7, 0.5), (2.0, 0.0)])
@pytest.mark.parametrize("batch", [(), (L,)])
def test_the_gradient_is_that_of_autograd(p, q, c0, batch):
    tensors = problem(*batch)
    found = cdist_grad_expadd(*tensors, p=p, q=q, c0=c0, scale=-0.4)
    expected = gradient(*tensors, p, q, c0, -0.4)
    assert found.shape == (*batch, 2, 5, 6) and found.is_contiguous()
    torch.testing.assert_close(found, expected)


def test_sums_that_are_there_are_not_made_again():
    a, b, c, d = problem()
    s = cdist_expadd(b.mT, d.mT, p=1.3, scale=-0.4)
    options = {"p": 1.3, "q": 0.7, "c0": 0.2, "scale": -0.4}
    expected = cdist_grad_expadd(a, b, c, d, **options)
    torch.testing.assert_close(cdist_grad_expadd(a, b, c, d, s_km=s, **options), expected)
    other = cdist_grad_expadd(a, b, c, d, s_km=4 * s, **options | {"c0": 0.8})
    torch.testing.assert_close(other, expected * 4 ** (0.7 - 1))


@pytest.mark.parametrize("p", [0.7, 1.0, 1.3])
def test_equal_coordinates_add_nothing(p):
    a, b, c, d = problem()
    d[:] = 0.0
    b[:] = 0.0
    options = {"p": p, "q": 0.7, "scale": -0.4}
    assert not cdist_grad_expadd(a, b, c, d, **options).any()
    b[:, 0] = 0.25
    found = cdist_grad_expadd(a, b, c, d, **options)
    s = 5 * math.exp(-0.4 * 0.25**p)
    one = 0.7 * s ** (0.7 - 1) * 0.4 * p * 0.25 ** (p - 1) * math.exp(-0.4 * 0.25**p)
    expected = (c[:, 0, None, None] * a[0] * one).expand(2, 5, 6)
    torch.testing.assert_close(found, expected)


def test_a_gradient_fills_an_out_of_either_rank_and_any_strides():
    a, b, c, d = problem()
    expected = cdist_grad_expadd(a, b, c, d, scale=-0.4)
    for shape in ((2, 5, 6), (1, 2, 5, 6)):
        out = torch.full((*shape[:-1], 9), NAN, dtype=torch.float64)[..., :6]
        assert cdist_grad_expadd(a, b, c, d, out=out, scale=-0.4) is out
        torch.testing.assert_close(out, expected.view(shape))
        turned = torch.full((*shape[:-2], 6, 5), NAN, dtype=torch.float64).mT
        torch.testing.assert_close(
            cdist_grad_expadd(a, b, c, d, out=turned, scale=-0.4), expected.view(shape)
        )


def test_batches_broadcast_those_of_numbers_too():
    a, b, c, d = problem()
    scale, q = torch.tensor([-0.4, -0.2, -1.0]), torch.tensor([0.5])
    found = cdist_grad_expadd(a, b[None].expand(L, -1, -1), c, d, p=1.3, q=q, scale=scale)
    for l in range(L):
        one = cdist_grad_expadd(a, b, c, d, p=1.3, q=0.5, scale=scale[l].item())
        torch.testing.assert_close(found[l], one, rtol=1e-6, atol=1e-6)


def test_shared_memory_and_gradients_are_refused():
    a, b, c, d = problem()
    memory = torch.zeros(200, dtype=torch.float64)
    d = memory[:30].view(5, 6).copy_(d)
    with pytest.raises(ValueError, match="out shares memory with d"):
        cdist_grad_expadd(a, b, c, d, out=memory[:60].view(2, 5, 6), scale=-0.4)
    with pytest.raises(ValueError, match="out overlaps itself"):
        cdist_grad_expadd(a, b, c, d, out=memory[:30].view(1, 5, 6).expand(2, 5, 6), scale=-0.4)
    with pytest.raises(RuntimeError, match="a requires a gradient"):
        cdist_grad_expadd(a.requires_grad_(), b, c, d, scale=-0.4)


def test_an_out_may_not_share_memory_with_a_number():
    a, b, c, d = problem()
    out = torch.ones(2, 5, 6, dtype=torch.float64)
    for name in ("p", "q", "c0", "lengthscale"):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            cdist_grad_expadd(a, b, c, d, out=out, **{"lengthscale": 1.0, name: out[0, 0, 0]})


# What is beyond any range, and who else calls.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [{"lengthscale": 1e-300}, {"scale": -1e301}, {"scale": -INF}])
def test_sums_of_a_scale_beyond_the_range_count_equal_coordinates(dtype, given):
    a = draw(M, K).to(dtype)
    found = cdist_expadd(a, a, p=2.0, **given)
    assert torch.equal(found, K * torch.eye(M, dtype=dtype))
    tensors = [draw(*s).to(dtype) for s in ((M, M), (2, M))]
    slopes = cdist_grad_expadd(tensors[0], a.mT, tensors[1], a.mT, q=2.0, **given)
    assert torch.equal(slopes, torch.zeros_like(slopes))


def test_half_types_take_a_float32_out():
    tensors = [t.half() for t in problem()]
    out = torch.full((2, 5, 6), NAN)
    assert cdist_grad_expadd(*tensors, out=out, scale=-0.4, q=2.0) is out
    rounded = cdist_grad_expadd(*tensors, scale=-0.4, q=2.0)
    assert rounded.dtype == torch.float16
    torch.testing.assert_close(out.half(), rounded)


def test_a_lengthscale_may_be_a_tensor_of_a_compiled_or_fake_call():
    a, b, length = draw(M, K), draw(N, K, seed=1), torch.tensor([1.0, 2.0], dtype=torch.float64)
    wanted = cdist_expadd(a, b, p=1.5, lengthscale=length)
    run = torch.compile(
        lambda a, b, length: cdist_expadd(a, b, p=1.5, lengthscale=length),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    torch.testing.assert_close(run(a, b, length), wanted)
    with FakeTensorMode() as mode:
        found = cdist_expadd(*(mode.from_tensor(t) for t in (a, b)), p=1.5,
                             lengthscale=mode.from_tensor(length))  # fmt: skip
    assert found.shape == wanted.shape


@pytest.mark.parametrize("name", ["lengthscale", "p"])
def test_transforms_of_numbers_are_refused_by_name(name):
    a, b = draw(M, K), draw(N, K, seed=1)
    with pytest.raises(RuntimeError, match=f"{name} is inside a transform of torch.func"):
        torch.vmap(lambda x: cdist_expadd(a, b, **{"lengthscale": 1.0, name: x}))(torch.ones(3))


LENGTHS = (1e-36, 1e-30, 1e-16, 1e-5, 1e5, 1e20, 1e29, 1e37, 9e37)


@pytest.mark.parametrize("kind", ["number", "tensor", "batch"])
@pytest.mark.parametrize("p", [0.7, 1.3, 2.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_no_lengthscale_leaves_the_range_of_float32(length, p, kind):
    a, b = (length * draw(2, n, 6, dtype=torch.float32) for n in (5, 7))
    given = {
        "number": length,
        "tensor": torch.tensor(length, dtype=torch.float64),
        "batch": torch.tensor([length, 2 * length], dtype=torch.float64),
    }[kind]
    lengths = torch.as_tensor(given, dtype=torch.float64).reshape(-1, 1, 1, 1)
    v = (a.double()[:, :, None] - b.double()[:, None]).abs() / lengths
    found = kl.cdist_expadd(a, b, p=p, lengthscale=given)
    torch.testing.assert_close(
        found.double(), torch.exp(-(v**p)).sum(-1), rtol=0, atol=6e-6, check_dtype=True
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_the_longest_lengthscale_is_one_like_others(kind):
    a = draw(6, 4, dtype=torch.float32)
    given = 1e38 if kind == "number" else torch.tensor(1e38)
    found = kl.cdist_expadd(1e38 * a.tanh(), 0.5e38 * a.tanh(), p=2.0, lengthscale=given)
    near = kl.cdist_expadd(a.tanh(), 0.5 * a.tanh(), p=2.0, lengthscale=1.0)
    torch.testing.assert_close(found, near, rtol=0, atol=6e-6)


def test_slopes_of_points_far_beyond_a_lengthscale_are_0():
    points = draw(3, 5, dtype=torch.float32)
    others = {"c": torch.ones(1, 5), "d": points, "p": 3.0, "lengthscale": 1e-30}
    slopes = kl.cdist_grad_expadd(torch.ones(5, 5), points, **others)
    assert (slopes == 0).all()


def test_gradients_pass_the_unit_of_a_lengthscale():
    length = 1e-20
    a, b = (draw(n, 6, dtype=torch.float32) for n in (5, 7))
    wide = [x.double().requires_grad_() for x in (a, b, torch.tensor(1.5))]
    torch.exp(-(((wide[0][:, None] - wide[1]) / wide[2]) ** 2)).sum().backward()
    own = [(length * x).requires_grad_() for x in (a, b, torch.tensor(1.5))]
    kl.cdist_expadd(own[0], own[1], p=2.0, lengthscale=own[2]).sum().backward()
    for found, wanted in zip(own, wide, strict=True):
        scaled = length * found.grad.double()
        torch.testing.assert_close(scaled, wanted.grad, rtol=1e-4, atol=1e-4)


def test_an_out_that_overlaps_is_refused_where_the_points_are_copied_too():
    a = torch.randn(6, 6)
    with pytest.raises(ValueError, match=r"overlap|share"):
        kl.cdist_expadd(a, a, lengthscale=1e-20, out=a)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("p", [1.3, 2.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_gradients_of_sums_for_any_lengthscale(length, p, kind):
    """In units of the lengthscale they are what they are for one of 1."""
    a, c, b, d = (draw(*s, dtype=torch.float32) for s in ((8, 5), (2, 8), (3, 8), (3, 5)))
    given = length if kind == "number" else torch.tensor(length, dtype=torch.float64)
    wide = [x.double() for x in (a, b, c, d)]
    wanted = kl.cdist_grad_expadd(*wide, p=p, q=0.5, lengthscale=1.0)
    near, far = ((length * x.double()).float() for x in (b, d))
    found = kl.cdist_grad_expadd(a, near, c, far, p=p, q=0.5, lengthscale=given)
    torch.testing.assert_close(length * found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_gradients_on_data_with_heavy_tails(kind):
    """Relative to the sum of absolute terms, and to the exponent of each, as it is rounded."""
    a, c = draw(400, 30, dtype=torch.float32), draw(2, 400, dtype=torch.float32)
    b, d = ((draw(19, n) / draw(19, n, seed=1)).float() for n in (400, 30))
    given = 3.0 if kind == "number" else torch.tensor(3.0)
    found = kl.cdist_grad_expadd(a, b, c, d, p=2.0, lengthscale=given)
    wide = [x.double() for x in (a, b, c, d)]
    wanted = kl.cdist_grad_expadd(*wide, p=2.0, lengthscale=3.0)
    v = wide[3][:, None] - wide[1][:, :, None]  # (N, K, M)
    slopes = 2 * v.abs() / 9 * torch.exp(-v.square() / 9) * (1 + v.square() / 72)
    terms = torch.einsum("ok,km,nkm->onm", wide[2].abs(), wide[0].abs(), slopes)
    assert ((found - wanted).abs() <= 3e-6 * terms + 1e-37).all()
