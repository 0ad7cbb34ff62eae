"""cdist_grad and pair gradients on CPU tensors: values, batches, outputs and what is refused."""

import math

import numpy as np
import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.gradients.points import pair_gradient
from tests.families.pairwise.cases import draw

K, M, N, O, L = 9, 5, 4, 3, 2
PS = [0, 0.3, 0.5, 0.7, 1, 1 + 1e-7, 1.1, 1.5, 2, 2.5, 3, 4, 6]


def operands(*batch, dtype=torch.float64):
    shapes = ((K, M), (N, K), (O, K), (N, M))
    made = [draw(*batch, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    made[3][..., 0] = made[1][..., 2]  # a query that is a training point
    return made


def formula(a, b, c, d, p, eps=1e-8):
    v = d[..., :, None, :] - b[..., :, :, None]  # N, K, M
    size = v.abs().clamp(min=eps) if p < 1 else v.abs()
    slope = torch.where(v == 0, 0.0, v.sign() * size ** (p - 1))
    return torch.einsum("...ok,...km,...nkm->...onm", c, a, slope)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_the_formula(p, dtype):
    given = operands(dtype=dtype)
    wanted = formula(*(t.double() for t in given), p)
    found = kl.cdist_grad(*given, p=p)
    assert found.shape == (O, N, M) and found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p", PS)
def test_equal_coordinates_add_exactly_nothing(p):
    points = torch.randint(0, 2, (N, K), generator=torch.Generator().manual_seed(1)).double()
    queries = points[:, :1].expand(N, M)
    a = torch.zeros(K, M, dtype=torch.float64)
    equal = (points == points[:, :1]).all(0)
    a[equal] = 1e30
    assert (kl.cdist_grad(a, points, draw(O, K), queries, p=p) == 0).all()


def test_differences_are_clamped_for_exponents_below_zero_only():
    a, c = torch.ones(1, 1), torch.ones(1, 1)
    b, d = torch.zeros(1, 1), torch.full((1, 1), 1e-12)
    assert kl.cdist_grad(a, b, c, d, p=0.5).item() == pytest.approx(1e4)
    assert kl.cdist_grad(a, b, c, d, p=0.5, eps=1e-4).item() == pytest.approx(1e2)
    assert kl.cdist_grad(a, b, c, d, p=2.0).item() == pytest.approx(1e-12)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("place", range(4))
def test_a_nan_reaches_what_it_is_part_of(p, place):
    given = operands()
    given[place][1, 2] = math.nan
    lost = {
        0: lambda out: out[:, :, 2],  # the weight of query 2
        1: lambda out: out[:, 1],  # feature 1 of a training point
        2: lambda out: out[1],  # a coefficient of set 1
        3: lambda out: out[:, 1, 2],
    }[place]
    found = kl.cdist_grad(*given, p=p)
    assert lost(found).isnan().all()
    assert found.isnan().sum() == lost(found).numel()


def test_exponents_that_mean_nothing_are_refused():
    for p in (-1, -0.5, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="p must be"):
            kl.cdist_grad(*operands(), p=p)
        with pytest.raises(ValueError, match="p must be"):
            kl.cdist_grad(*operands(), p=torch.tensor(p))


def test_nothing_to_sum_and_nothing_to_write():
    a, b, c, d = operands()
    assert (kl.cdist_grad(a[:0], b[:, :0], c[:, :0], d) == 0).all()
    assert kl.cdist_grad(a[:, :0], b, c, d[:, :0]).shape == (O, N, 0)
    assert kl.cdist_grad(a, b[:0], c, d[:0]).shape == (O, 0, M)
    assert kl.cdist_grad(a, b, c[:0], d).shape == (0, N, M)
    assert kl.cdist_grad(a[None][:0], b, c, d).shape == (0, O, N, M)
    x, z, w = d.mT, b.mT, a.mT
    assert pair_gradient("difference", kl.Abs(), x, z, w, c[:0]).shape == (0, M, N)


def test_any_real_number_is_an_exponent():
    wanted = kl.cdist_grad(*operands(), p=2.0)
    for p in (2, np.float32(2), np.int64(2), torch.tensor(2), torch.tensor(2.0)):
        assert torch.equal(kl.cdist_grad(*operands(), p=p), wanted)


# Batches.


@pytest.mark.parametrize("batched", range(1, 16))
def test_batches_are_a_loop(batched):
    whole, single = operands(L), operands()
    given = [whole[i] if batched >> i & 1 else single[i] for i in range(4)]
    found = kl.cdist_grad(*given, p=1.5)
    for l in range(L):
        wanted = kl.cdist_grad(*(t[l] if t.dim() == 3 else t for t in given), p=1.5)
        torch.testing.assert_close(found[l], wanted)


def test_every_shape_and_stride_of_p_is_a_loop_over_numbers():
    a, b, c, d = operands(L)
    for p in (
        torch.tensor(1.5),
        torch.tensor([1.5]),
        torch.tensor([1.5, 0.7]),
        torch.tensor([1.5, 0.0, 0.7, 0.0])[::2],
        torch.tensor([1.5]).expand(L),
    ):
        found = kl.cdist_grad(a, b, c, d, p=p)
        for l in range(L):
            own = float(p.reshape(-1)[l if p.numel() > 1 else 0])
            wanted = kl.cdist_grad(a[l], b[l], c[l], d[l], p=own)
            torch.testing.assert_close(found[l], wanted, rtol=1e-6, atol=1e-6)


def test_a_batch_of_one_keeps_its_rank():
    a, b, c, d = operands(1)
    assert kl.cdist_grad(a, b, c, d).shape == (1, O, N, M)
    assert kl.cdist_grad(a[0], b[0], c[0], d[0], p=torch.tensor([2.0])).shape == (O, N, M)
    p = torch.tensor([1.0, 2.0])
    assert kl.cdist_grad(a[0], b[0], c[0], d[0], p=p).shape == (2, O, N, M)


# Outputs.


def test_out_of_any_strides_is_filled_and_answered():
    given = operands()
    wanted = kl.cdist_grad(*given)
    big = torch.full((O, N, 2 * M), math.nan, dtype=torch.float64)
    for out in (
        torch.full((O, N, M), math.nan, dtype=torch.float64),
        big[..., ::2],
        torch.full((M, N, O), math.nan, dtype=torch.float64).permute(2, 1, 0),
    ):
        assert kl.cdist_grad(*given, out=out) is out
        torch.testing.assert_close(out, wanted)
    assert big[..., 1::2].isnan().all()


def test_out_is_added_to():
    a, b, c, d = operands()
    x, z, w = d.mT, b.mT, a.mT
    wanted = pair_gradient("difference", kl.Square(), x, z, w, c)
    out = torch.ones_like(wanted)
    pair_gradient("difference", kl.Square(), x, z, w, c, out=out, accumulate=True)
    torch.testing.assert_close(out, wanted + 1)


# What is refused.


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (K + 1, M), r"a must be .*, \(9, 5\) by the shapes of d and b, got \(10, 5\)"),
        (0, (M, K), r"a must be .*, got \(5, 9\)"),
        (1, (N, K + 1), r"a must be .*, \(10, 5\) by the shapes of d and b, got \(9, 5\)"),
        (1, (N + 1, K), r"b must be .*, \(4, 9\) by the shapes of d, got \(5, 9\)"),
        (2, (O, K + 1), r"c must be .*, \(3, 9\) by the shapes of d and b, got \(3, 10\)"),
        (0, (K,), r"a must be \(K, M\) or \(L, K, M\), got shape \(9,\)"),
        (1, (1, 1, N, K), r"b must be \(N, K\) or \(L, N, K\), got shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape, message):
    given = operands()
    given[place] = draw(*shape)
    with pytest.raises(ValueError, match=message):
        kl.cdist_grad(*given)


def test_other_things_than_tensors_are_refused():
    a, b, c, d = operands()
    with pytest.raises(TypeError, match="c must be a tensor, got NoneType"):
        kl.cdist_grad(a, b, None, d)
    with pytest.raises(TypeError, match="a must be a tensor, got list"):
        kl.cdist_grad([1.0], b, c, d)
    with pytest.raises(TypeError, match="a must have the dtype of d"):
        kl.cdist_grad(a.float(), b, c, d)
    with pytest.raises(TypeError, match="d must be one of"):
        kl.cdist_grad(*(t.long() for t in (a, b, c, d)))
    with pytest.raises(TypeError, match="p must be a real number"):
        kl.cdist_grad(a, b, c, d, p="2")
    with pytest.raises(TypeError, match="eps must be"):
        kl.cdist_grad(a, b, c, d, eps=torch.tensor(1e-8))
    with pytest.raises(ValueError, match="eps must be 0 or greater"):
        kl.cdist_grad(a, b, c, d, eps=-1)
    with pytest.raises(TypeError, match=r"out must be torch\.float64"):
        kl.cdist_grad(a, b, c, d, out=torch.empty(O, N, M))
    with pytest.raises(ValueError, match=r"out must have shape \(3, 4, 5\)"):
        kl.cdist_grad(a, b, c, d, out=torch.empty(O, M, N, dtype=torch.float64))


def test_memory_that_is_shared_is_refused():
    a, b, c, d = operands()
    big = draw(O * N * M)
    for place in range(4):
        given = [a, b, c, d]
        given[place] = big[: given[place].numel()].view(given[place].shape)
        name = "abcd"[place]
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            kl.cdist_grad(*given, out=big.view(O, N, M))
    with pytest.raises(ValueError, match="overlaps itself"):
        kl.cdist_grad(a, b, c, d, out=big[:1].view(1, 1, 1).expand(O, N, M))
    with pytest.raises(ValueError, match="out shares memory with p"):
        kl.cdist_grad(a, b, c, d, p=big[3], out=big.view(O, N, M))


def test_autocast_changes_nothing():
    given = [t.float() for t in operands()]
    wanted = kl.cdist_grad(*given, p=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kl.cdist_grad(*given, p=2), wanted)


@pytest.mark.parametrize("place", range(4))
def test_gradients_are_refused_and_not_dropped(place):
    given = operands()
    given[place].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{'abcd'[place]} requires a gradient"):
        kl.cdist_grad(*given)
    with torch.no_grad():
        kl.cdist_grad(*given)


def test_lazy_tensors_are_read_as_their_values():
    a, b, c, d = operands()
    complex_a = torch.complex(a, a).conj().imag  # -a, as a view that says so
    assert complex_a.is_neg()
    torch.testing.assert_close(kl.cdist_grad(complex_a, b, c, d), -kl.cdist_grad(a, b, c, d))
    zero = torch._efficientzerotensor(a.shape, dtype=a.dtype)
    assert (kl.cdist_grad(zero, b, c, d) == 0).all()


# The stages of pair_gradient.

STAGES = {
    "Identity": (kl.Identity(), {}, lambda v: v),
    "Abs": (kl.Abs(), {}, torch.abs),
    "Square": (kl.Square(), {}, torch.square),
    "Sqrt": (kl.Sqrt(), {}, torch.sqrt),
    "Power": (kl.Power(), {"p": 1.7}, lambda v: v.abs() ** 1.7),
    "ExpPower": (
        kl.ExpPower(),
        {"p": 1.3, "inner_scale": -0.4},
        lambda v: torch.exp(-0.4 * v.abs() ** 1.3),
    ),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("operator", ["difference", "dot"])
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_differentiated_as_autograd_does(name, operator, first):
    inner, values, function = STAGES[name]
    x, z, w = draw(M, N), draw(K, N), draw(M, K)
    if name == "Sqrt":  # of positive values only
        x, z = x.abs() + (0 if first else 9), z.abs() + (9 if first else 0)
    x.requires_grad_()
    difference = z - x[:, None] if first else x[:, None] - z
    v = x[:, None] * z if operator == "dot" else difference
    (wanted,) = torch.autograd.grad((w[..., None] * function(v)).sum(), x)
    found = pair_gradient(operator, inner, x.detach(), z, w, first=first, **values)
    torch.testing.assert_close(found, wanted)


def test_numbers_that_are_missing_are_named():
    x, z, w = draw(M, N), draw(K, N), draw(M, K)
    with pytest.raises(ValueError, match="needs p"):
        pair_gradient("difference", kl.Power(), x, z, w)
    with pytest.raises(ValueError, match="needs inner_scale"):
        pair_gradient("difference", kl.ExpPower(), x, z, w, p=2)
    with pytest.raises(TypeError, match="inner must be one of"):
        pair_gradient("difference", kl.Root(), x, z, w)
    with pytest.raises(ValueError, match="operator must be"):
        pair_gradient("sum", kl.Abs(), x, z, w)


def test_blocks_of_many_points_add_up(monkeypatch):
    from kernlib.families.pairwise.gradients import reference

    given = operands(L)
    wanted = kl.cdist_grad(*given, p=1.5)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 8)
    torch.testing.assert_close(kl.cdist_grad(*given, p=1.5), wanted)
