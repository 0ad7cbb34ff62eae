"""Gradients of the pairwise op on a GPU, and the average gradient outer product."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import kernlib as kl
from kernlib.families.pairwise.functions.agop import agop
from kernlib.families.pairwise.gradients import backward, operators
from tests.gpu.families.pairwise.cases import points, relative_error
from tests.gpu.watched import nothing_waits, peak
from tests.support.ties import ACTIVATIONS, CHOSEN
from tests.support.torch_settings import torch_permits

CASES = {  # descriptor, hyperparameters
    "l1": (kl.l1_distance(), {}),
    "l2": (kl.l2_distance(), {}),
    "squares": (kl.squared_distance(), {}),
    "p": (kl.p_distance(), {"p": 1.5}),
    "general p": (kl.p_distance(), {"p": 1.3}),
    "small p": (kl.laplace_pq(), {"p": 0.7, "q": 0.7, "bandwidth": 30.0}),
    "gaussian": (kl.gaussian(), {"bandwidth": 8.0}),
    "laplace": (kl.laplace_l1(), {"bandwidth": 60.0}),
    "laplace l2": (kl.laplace_l2(), {"bandwidth": 8.0}),
    "polynomial": (kl.polynomial(2), {"gamma": 0.1, "offset": 1.0}),
}


def number(value, dtype=torch.float32):
    return torch.tensor(value, device="cuda", dtype=dtype, requires_grad=True)


def gradients(descriptor, tensors, values, along, **options):
    k = kl.run_kernel(descriptor, *tensors, **values, **options)
    leaves = (*tensors, *(v for v in values.values() if isinstance(v, torch.Tensor)))
    return torch.autograd.grad(k, leaves, along)


def exact(descriptor, tensors, values, along, **options):
    """Those in float64 on the CPU."""
    wide = [t.detach().cpu().double().requires_grad_() for t in tensors]
    given = {
        k: v.detach().cpu().double().requires_grad_() if isinstance(v, torch.Tensor) else v
        for k, v in values.items()
    }
    return gradients(descriptor, wide, given, along.cpu().double(), **options)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (65, 130, 33), (257, 129, 100)])
@pytest.mark.parametrize("case", CASES)
def test_gradients_match_float64(case, shape, on_device, seed):
    descriptor, values = CASES[case]
    if on_device:
        values = {name: number(value) for name, value in values.items()}
    m, n, k = shape
    a, b = points(m, k).requires_grad_(), points(n, k).requires_grad_()
    along = torch.rand(m, n, device="cuda") + 0.5
    found = gradients(descriptor, (a, b), values, along)
    wanted = exact(descriptor, (a, b), values, along)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) <= 2e-5 or (ours.cpu() - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("how", ["eager", "registered"])
@pytest.mark.parametrize("case", ["gaussian", "laplace l2", "polynomial", "p"])
def test_gradients_pass_gradcheck(case, how, seed):
    descriptor, values = CASES[case]
    given = {
        name: number(v + 1.2 if name == "p" else v, torch.float64) for name, v in values.items()
    }
    a, b = (points(rows, 3, dtype=torch.float64).requires_grad_() for rows in (4, 5))

    def function(a, b, *tensors):
        named = dict(zip(given, tensors, strict=True))
        if how == "eager":
            return kl.run_kernel(descriptor, a, b, **named)
        return operators.recorded(descriptor, a, b, named, 0)

    assert gradcheck(function, (a, b, *given.values()))
    assert gradgradcheck(function, (a, b, *given.values()))


@pytest.mark.parametrize("case", ["l1", "p", "general p", "small p", "gaussian"])
def test_equal_points_and_coordinates(case, seed):
    descriptor, values = CASES[case]
    a = torch.randint(0, 3, (300, 4), device="cuda").float().requires_grad_()
    along = torch.rand(300, 300, device="cuda")
    found = gradients(descriptor, (a, a.detach().clone().requires_grad_()), values, along)
    wanted = exact(descriptor, (a, a), values, along)
    assert all(g.isfinite().all() for g in found)
    assert relative_error(found[0] + found[1], wanted[0] + wanted[1]) <= 2e-5


TIES = {kl.Custom(text): slope for text, slope in CHOSEN.items()}
TIES |= {activation: slopes[0] for activation, slopes in ACTIVATIONS.items()}


@pytest.mark.parametrize("epilogue", TIES, ids=str)
def test_two_equal_sides_of_a_formula(epilogue):
    """Of every value, by the kernel that computes the derivative."""
    a = torch.zeros(300, 4, device="cuda", requires_grad=True)
    b = torch.arange(20.0, device="cuda").reshape(5, 4)
    kernel = kl.dot_product(epilogue=epilogue)
    (found,) = torch.autograd.grad(kl.run_kernel(kernel, a, b).sum(), a)
    torch.testing.assert_close(found, TIES[epilogue] * b.sum(0).expand(300, 4))


@pytest.mark.parametrize("case", ["p", "gaussian"])
def test_symmetric_batches_and_blocks(case, monkeypatch, seed):
    descriptor, values = CASES[case]
    descriptor = descriptor.replace(symmetric=True)
    a = points(3, 200, 33).requires_grad_()
    values = {name: number([value, value * 1.1, value * 1.2]) for name, value in values.items()}
    if descriptor.epilogue:
        values["regularization"] = number(0.5)
    along = torch.rand(3, 200, 200, device="cuda")
    wanted = exact(descriptor, (a,), values, along)
    for entries in (1 << 25, 30000, 1):
        monkeypatch.setattr(backward, "BLOCK_ENTRIES", entries)
        found = gradients(descriptor, (a,), values, along)
        for ours, theirs in zip(found, wanted, strict=True):
            assert relative_error(ours, theirs) <= 2e-5


@pytest.mark.parametrize("case", ["l1", "gaussian", "laplace"])
def test_the_matrix_is_not_kept(case, monkeypatch):
    descriptor, values = CASES[case]
    monkeypatch.setattr(backward, "BLOCK_ENTRIES", 1 << 20)
    a, b = points(8192, 16).requires_grad_(), points(8192, 16).requires_grad_()
    along = torch.ones((), device="cuda").expand(8192, 8192)
    k = kl.run_kernel(descriptor, a, b, **values)
    torch.autograd.grad(k, (a, b), along, retain_graph=True)
    _, extra = peak(lambda: torch.autograd.grad(k, (a, b), along))
    assert extra < 128 << 20, f"{extra >> 20} MB, where the matrix has 256"


def test_nothing_waits_for_the_device(seed):
    a, b = points(300, 33).requires_grad_(), points(200, 33).requires_grad_()
    values = {"p": number(1.4), "q": number(0.9), "bandwidth": number(30.0)}
    along = torch.rand(300, 200, device="cuda")
    gradients(kl.laplace_pq(), (a, b), values, along)
    with nothing_waits():
        gradients(kl.laplace_pq(), (a, b), values, along)


@pytest.mark.parametrize("case", ["p", "gaussian", "laplace", "polynomial"])
def test_compiled_gradients_match_float64(case, seed):
    descriptor, values = CASES[case]
    values = {name: number(value) for name, value in values.items()}
    a, b = points(65, 33).requires_grad_(), points(130, 33).requires_grad_()
    along = torch.rand(65, 130, device="cuda")
    leaves = (a, b, *values.values())

    def function(a, b, *tensors):
        return kl.run_kernel(descriptor, a, b, **dict(zip(values, tensors, strict=True)))

    run = torch.compile(function, fullgraph=True)
    found = torch.autograd.grad(run(*leaves), leaves, along)
    wanted = exact(descriptor, (a, b), values, along)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) <= 2e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("diagonal", [False, True])
def test_agop_is_not_in_tf32_where_the_descriptor_forbids_it(diagonal, seed):
    x, z, c = points(300, 40), points(200, 40), points(2, 200)
    descriptor, options = kl.gaussian(precision="fp32"), {"bandwidth": 9.0, "diagonal": diagonal}
    wanted = agop(descriptor, *(t.double() for t in (x, z, c)), centred=True, **options)
    with torch_permits("allow_tf32"):
        found = agop(descriptor, x, z, c, centred=True, **options)
    assert (found - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_agop(case, centred, monkeypatch, seed):
    monkeypatch.setattr(backward, "BLOCK_ENTRIES", 20000)
    descriptor, values = CASES[case]
    x, z, c = points(257, 33), points(130, 33), points(5, 130)
    wide = [t.cpu().double() for t in (x, z, c)]
    wanted = agop(descriptor, *wide, centred=centred, **values)
    found = agop(descriptor, x, z, c, centred=centred, **values)
    assert relative_error(found, wanted) <= 5e-5
    found = agop(descriptor, x, z, c, centred=centred, diagonal=True, **values)
    assert relative_error(found, wanted.diagonal()) <= 5e-5


def test_agop_stores_no_gradients(monkeypatch):
    monkeypatch.setattr(backward, "BLOCK_ENTRIES", 1 << 20)
    x, z, c = points(20000, 64), points(2000, 64), points(10, 2000)  # 51 MB of gradients
    agop(kl.laplace_l2(), x, z, c, bandwidth=8.0)
    _, most = peak(lambda: agop(kl.laplace_l2(), x, z, c, bandwidth=8.0))
    assert most < 40 << 20


# Hyperparameters on the device, with and without a gradient.


@pytest.mark.parametrize("shape", [(), (3,)])
def test_negated_hyperparameters_keep_their_sign(shape, seed):
    a, b = points(3, 9, 5), points(7, 5)
    negated = torch.randn(shape, dtype=torch.complex64, device="cuda").conj().imag
    assert negated.is_neg()
    descriptor = kl.l1_distance(epilogue=kl.Scale())
    found = kl.run_kernel(descriptor, a, b, scale=negated)
    assert torch.equal(found, kl.run_kernel(descriptor, a, b, scale=negated.clone().resolve_neg()))


def test_out_must_not_be_a_hyperparameters_memory():
    memory = torch.ones(9 * 7 + 1, device="cuda")
    a, b = points(9, 5), points(7, 5)
    out = memory[:-1].view(9, 7)
    for _ in range(2):
        with pytest.raises(ValueError, match="out shares memory with bandwidth"):
            kl.run_kernel(kl.laplace_l1(), a, b, out=out, bandwidth=memory[-2])
        kl.run_kernel(kl.laplace_l1(), a, b, out=out, bandwidth=memory[-1])
