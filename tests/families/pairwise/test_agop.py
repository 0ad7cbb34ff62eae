"""The average gradient outer product, against gradients by autograd, on CPU tensors."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.functions.agop import agop
from kernlib.families.pairwise.gradients import backward
from kernlib.runtime import precision

Q, T, K, O, L = 9, 6, 4, 3, 2
DOUBLE = torch.float64
KERNELS = {
    "laplace": (kl.laplace_l1(), {"bandwidth": 3.0}),
    "gaussian": (kl.gaussian(), {"bandwidth": 2.0}),
    "pq": (kl.laplace_pq(), {"p": 1.3, "q": 0.8, "bandwidth": torch.tensor(3.0)}),
    "polynomial": (kl.polynomial(2), {"gamma": 0.5, "offset": 1.0}),
    "sums": (kl.power_sum(), {"p": 1.2}),
    "largest": (kl.p_distance(), {"p": float("inf")}),
    "regularized": (kl.gaussian(), {"bandwidth": 2.0, "regularization": 0.5}),
}


def points(*shape):
    return torch.randn(shape, dtype=DOUBLE)


def entry(value, l, dimensions):
    """The batch entry of a tensor that has a batch, else the whole."""
    batched = isinstance(value, torch.Tensor) and value.dim() == dimensions + 1
    return value[l if value.shape[0] > 1 else 0] if batched else value


def gradients(descriptor, x, z, c, values, batch):
    """(L, O, Q, K) by autograd."""
    made = []
    for l in range(batch):
        query = entry(x, l, 2).clone().requires_grad_()
        given = {name: entry(value, l, 0) for name, value in values.items()}
        k = kl.run_kernel(descriptor, query, entry(z, l, 2), **given)
        found = (entry(c, l, 2) @ k.mT).sum(-1)  # one number for each output
        made += [torch.stack([torch.autograd.grad(f, query, retain_graph=True)[0] for f in found])]
    return torch.stack(made)


def wanted(descriptor, x, z, c, values, batch=1, centred=False):
    g = gradients(descriptor, x, z, c, values, batch)
    g = g - g.mean(2, keepdim=True) if centred else g
    return torch.einsum("loqi,loqj->lij", g, g) / (g.shape[1] * g.shape[2])


@pytest.mark.parametrize("entries", [1 << 25, 60])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("case", KERNELS)
def test_it_is_the_average_product_of_gradients(case, centred, entries, monkeypatch, seed):
    monkeypatch.setattr(backward, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(backward, "FEWEST_ROWS", 2)
    descriptor, values = KERNELS[case]
    x, z, c = points(Q, K), points(T, K), points(O, T)
    x[1] = z[2]  # a query that is a point
    found = agop(descriptor, x, z, c, centred=centred, **values)
    expected = wanted(descriptor, x, z, c, values, centred=centred)[0]
    torch.testing.assert_close(found, expected)
    diagonal = agop(descriptor, x, z, c, centred=centred, diagonal=True, **values)
    torch.testing.assert_close(diagonal, expected.diagonal())
    torch.testing.assert_close(found, found.mT)


@pytest.mark.parametrize("entries", [1 << 25, 100])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("batched", ["x", "z", "c", "bandwidth", "x z c", "all"])
def test_batches_broadcast(batched, centred, entries, monkeypatch, seed):
    monkeypatch.setattr(backward, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(backward, "FEWEST_ROWS", 2)
    names = batched.split() if batched != "all" else ["x", "z", "c", "bandwidth"]
    shapes = {"x": (Q, K), "z": (T, K), "c": (O, T)}
    x, z, c = (points(*((L,) if n in names else ()), *shape) for n, shape in shapes.items())
    values = {"bandwidth": torch.tensor([2.0, 3.0]) if "bandwidth" in names else 2.0}
    found = agop(kl.laplace_l2(), x, z, c, centred=centred, **values)
    expected = wanted(kl.laplace_l2(), x, z, c, values, L, centred)
    assert found.shape == (L, K, K)
    torch.testing.assert_close(found, expected)
    out = torch.empty(L, K, dtype=DOUBLE)
    given = {"diagonal": True, "centred": centred, "out": out, **values}
    assert agop(kl.laplace_l2(), x, z, c, **given) is out
    torch.testing.assert_close(out, expected.diagonal(dim1=1, dim2=2))


def test_one_output_may_have_no_dimension(seed):
    x, z, c = points(Q, K), points(T, K), points(T)
    found = agop(kl.gaussian(), x, z, c, bandwidth=2.0)
    assert torch.equal(found, agop(kl.gaussian(), x, z, c[None], bandwidth=2.0))
    one = agop(kl.gaussian(), x[None], z, c, bandwidth=2.0)
    assert torch.equal(one, found[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_matches_float64(dtype, seed):
    x, z, c = (t.to(dtype) for t in (points(50, K), points(40, K), points(O, 40)))
    found = agop(kl.gaussian(), x, z, c, bandwidth=2.0)
    exact = agop(kl.gaussian(), x.double(), z.double(), c.double(), bandwidth=2.0)
    gate = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert found.dtype == dtype and (found - exact).norm() <= gate * exact.norm()
    wide = torch.empty(K, K, dtype=torch.float32)
    agop(kl.gaussian(), x, z, c, bandwidth=2.0, out=wide)
    assert (wide - exact).norm() <= 5e-6 * exact.norm()


def test_a_common_gradient_is_taken_away_without_cancelling(seed):
    """f(x) = 1e3 <w, x> + a little: centred, in float32, the little remains."""
    x, w = points(500, K), points(1, K)
    k = kl.polynomial(2)
    values = {"gamma": 1.0, "offset": 5e3}  # gradients 2 (<x, w> + 5e3) w
    found = agop(k, x.float(), w.float(), torch.ones(1, 1), centred=True, **values)
    spread = (2 * (x @ w[0])).var(correction=0)
    torch.testing.assert_close(found.double(), spread * w.mT @ w, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("descriptor, values", [
    (kl.gaussian(), {"bandwidth": 2.0}), (kl.p_distance(), {"p": math.inf}),
    (kl.Pairwise(inner=kl.PowerLog()), {"inner_p": 1.3}),
])  # fmt: skip
def test_modes_change_nothing(descriptor, values, seed):
    given = [points(7, 4).float(), points(9, 4).float(), points(2, 9).float()]
    wanted = agop(descriptor, *given, **values)
    assert wanted.any()
    with torch.inference_mode():
        inside = [t.clone() for t in given]
        assert torch.equal(agop(descriptor, *inside, **values), wanted)
    assert torch.equal(agop(descriptor, *inside, **values), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(agop(descriptor, *given, **values), wanted)


def test_no_points_and_no_features_have_no_gradient():
    c = torch.ones(O, 0)
    assert not agop(kl.gaussian(), torch.ones(Q, K), torch.ones(0, K), c, bandwidth=2.0).any()
    empty = agop(kl.gaussian(), torch.ones(Q, 0), torch.ones(T, 0), torch.ones(O, T), bandwidth=1.0)
    assert empty.shape == (0, 0)


def test_a_gradient_is_refused_and_not_dropped():
    x, z, c = torch.ones(Q, K), torch.ones(T, K), torch.ones(O, T, requires_grad=True)
    with pytest.raises(RuntimeError, match="coefficients requires"):
        agop(kl.gaussian(), x, z, c, bandwidth=2.0)


@pytest.mark.parametrize("permitted", ["fp32", "tf32", None])
def test_no_product_is_in_tf32_where_the_descriptor_forbids_it(permitted, monkeypatch, seed):
    """As torch's of float32 are on GPUs, by its settings."""
    asked = []
    monkeypatch.setattr(precision, "rounds", lambda t: not asked.append(tuple(t.shape)))
    x, z, c = (points(*size).float() for size in ((Q, K), (T, K), (O, T)))
    descriptor = kl.gaussian().replace(precision=permitted)
    found = agop(descriptor, x, z, c, bandwidth=2.0, centred=True)
    exact = agop(descriptor, *(t.double() for t in (x, z, c)), bandwidth=2.0, centred=True)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    sums = (1, K, O * Q), (1, K, O)  # of gradients, and of their means
    assert {*sums} & {*asked} == ({*sums} if permitted == "fp32" else set())
