"""The kernels and products of backward passes on a GPU, against torch's way and float64."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.gradients import backward, products, weights
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.pairwise.cases import points, relative_error

CASES = {  # descriptor, hyperparameters
    "l2": (kl.l2_distance(), {}),
    "p": (kl.p_distance(), {"p": 1.3}),
    "laplace": (kl.laplace_l1(), {"bandwidth": 60.0, "regularization": 0.5}),
    "laplace l2": (kl.laplace_l2(), {"bandwidth": 8.0}),
    "gaussian": (kl.gaussian(), {"bandwidth": 8.0}),
    "snapped": (kl.gaussian(), {"bandwidth": 8.0, "epsilon": 60.0}),
    "matern32": (kl.matern32(), {"bandwidth": 8.0}),
    "matern52": (kl.matern52(), {"bandwidth": 8.0}),
    "rational": (kl.rational_quadratic(), {"bandwidth": 8.0, "alpha": 0.8}),
    "cauchy": (kl.cauchy(), {"bandwidth": 8.0}),
    "pq": (kl.laplace_pq(), {"p": 1.4, "q": 0.8, "bandwidth": 30.0}),
    "polynomial": (kl.polynomial(2), {"gamma": 0.1, "offset": 1.0}),
    "chain": (kl.l2_distance(epilogue=(kl.Scale(), kl.Gelu(), kl.Silu())), {"scale": 0.1}),
}


def gradients(descriptor, tensors, values, along):
    k = kl.run_kernel(descriptor, *tensors, **values)
    leaves = (*tensors, *(v for v in values.values() if isinstance(v, torch.Tensor)))
    return torch.autograd.grad(k, leaves, along, allow_unused=True)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_torch_does(case, dtype, equal, monkeypatch, seed):
    descriptor, numbers = CASES[case]
    values = {
        name: torch.tensor(v, device="cuda", dtype=torch.float64, requires_grad=True)
        for name, v in numbers.items()
    }
    a, b = points(130, 33, dtype=dtype), points(257, 33, dtype=dtype)
    if equal:
        a, b = a.round(), b.round()
        b[:130] = a
    tensors = a.requires_grad_(), b.requires_grad_()
    along = (torch.rand(130, 257, device="cuda") + 0.5).to(dtype)
    found = gradients(descriptor, tensors, values, along)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "has_kernels", lambda finish: False)
        forget_plans()  # and with them that there are kernels
        wanted = gradients(descriptor, tensors, values, along)
    forget_plans()
    gate = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3}[dtype]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.isfinite().all()
        assert relative_error(ours, theirs) <= gate or (ours - theirs).abs().max() <= gate


@pytest.mark.parametrize("shape", [(130, 4096, 33), (257, 4100, 64), (1031, 517, 128)])
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_as_good_as_differences(shape, turned, seed):
    m, n, k = shape
    x, z = points(m, k) + 100, points(n, k) + 100
    given = points(n, m).mT if turned else points(m, n)
    wide = [t.double() for t in (x, z, given)]
    each = (wide[2].abs().sum(1, True) * wide[0].abs().std()).mean()
    wanted = 2 * (wide[2].sum(1, True) * wide[0] - wide[2] @ wide[1])
    found = products.squares("fp32", x, z, given)
    assert (found - wanted).abs().max() <= 1e-5 * each
    assert relative_error(products.dots("fp32", z, given), wide[2] @ wide[1]) <= 2e-6


@pytest.mark.parametrize("case", ["gaussian", "l2"])
def test_large_calls_by_blocks_and_products(case, monkeypatch, seed):
    descriptor, values = CASES[case]
    monkeypatch.setattr(products, "FEWEST", 1)
    tensors = points(1031, 100).requires_grad_(), points(517, 100).requires_grad_()
    along = torch.rand(1031, 517, device="cuda") + 0.5
    wide = [t.detach().cpu().double().requires_grad_() for t in tensors]
    wanted = gradients(descriptor, wide, values, along.cpu().double())
    for entries in (1 << 27, 200_000):
        monkeypatch.setattr(backward, "BLOCK_ENTRIES", entries)
        for ours, theirs in zip(gradients(descriptor, tensors, values, along), wanted, strict=True):
            assert relative_error(ours, theirs) <= 1e-5
