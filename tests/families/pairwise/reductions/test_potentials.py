"""Potentials of rows and columns of a log-sum-exp, against torch in float64."""

import math
import re

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.reductions import blocks
from tests.families.pairwise.cases import points
from tests.families.pairwise.categories.cases import drawn

LOG = kl.squared_distance(epilogue=kl.Custom("-s * v", ("s",)))
DOUBLE = torch.float64


def doubles(*shape, seed=0):
    return points(*shape, seed=seed).to(DOUBLE).requires_grad_()


def call(a, b, s, f, g):
    return kl.kernel_logsumexp(LOG, a, b, s=s, row_potential=f, col_potential=g)


def wanted(a, b, s, f, g):
    squares = (a[..., :, None, :] - b[..., None, :, :]).square().sum(-1)
    return f + (g[..., None, :] - s * squares).logsumexp(-1)


SHAPES = {
    "vectors": ((5, 2), (7, 2), (5,), (7,)),
    "a batch": ((3, 5, 2), (7, 2), (5,), (3, 7)),
    "one matrix of a batch": ((5, 2), (7, 2), (3, 5), (3, 7)),
    "one of a batch": ((3, 5, 2), (3, 7, 2), (1, 5), (1, 7)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(name, monkeypatch):
    a, b, f, g = (doubles(*shape, seed=i) for i, shape in enumerate(SHAPES[name]))
    tensors = a, b, torch.tensor(0.7, dtype=DOUBLE, requires_grad=True), f, g
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)
    monkeypatch.setattr(blocks, "CPU_BLOCK_BYTES", 14 * 8)  # two rows
    torch.testing.assert_close(call(*tensors), wanted(*tensors))
    (alone,) = torch.autograd.grad(call(*(t.detach() for t in tensors[:4]), g).sum(), g)
    torch.testing.assert_close(alone, torch.autograd.grad(wanted(*tensors).sum(), g)[0])


def test_hostile_potentials():
    a, b, f, g = doubles(5, 3), doubles(9, 3, seed=1), doubles(5, seed=2), doubles(9, seed=3)
    g = torch.where(torch.arange(9) % 3 == 0, -math.inf, 1e4 * g).detach().requires_grad_()
    f = (1e4 * f).detach().requires_grad_()
    tensors = a, b, torch.tensor(0.7, dtype=DOUBLE), f, g
    torch.testing.assert_close(call(*tensors), wanted(*tensors))
    ours, theirs = (torch.autograd.grad(y(*tensors).sum(), (a, b, f, g)) for y in (call, wanted))
    torch.testing.assert_close(ours, theirs)
    assert ours[3][::3].eq(0).all()
    nothing = torch.full((9,), -math.inf, dtype=DOUBLE, requires_grad=True)
    y = call(*tensors[:4], nothing)
    assert y.eq(-math.inf).all()
    assert all(t.eq(0).all() for t in torch.autograd.grad(y.sum(), (a, b, nothing)))


def test_compiled_and_mapped():
    a, b, f, g = doubles(5, 2), doubles(7, 2, seed=1), doubles(5, seed=2), doubles(7, seed=3)
    compiled = torch.compile(
        lambda *tensors: call(*tensors).sin(), backend="aot_eager", fullgraph=True
    )
    tensors = a, b, torch.tensor(0.7, dtype=DOUBLE), f, g
    y, z = compiled(*tensors), wanted(*tensors).sin()
    torch.testing.assert_close(y, z)
    grads = (torch.autograd.grad(t.sum(), (a, b, f, g)) for t in (y, z))
    torch.testing.assert_close(*grads)
    several = doubles(4, 7, seed=4).detach()
    mapped = torch.vmap(lambda g: call(a.detach(), b.detach(), 0.7, f.detach(), g))(several)
    torch.testing.assert_close(mapped, wanted(a, b, 0.7, f, several))


def test_a_potential_beside_categories_has_a_gradient():
    case, descriptor = drawn(11, 9, 4, (3, 5)), kl.l1_distance(categories=2)
    g = doubles(9)
    y = kl.kernel_logsumexp(descriptor, case.a, case.b, col_potential=g, **case.codes)
    z = (case.run(descriptor) + g).logsumexp(-1)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), g) for t in (y, z)))


def test_float32_potentials_of_half_types_make_the_result_float32():
    a, b, g = points(5, 2).half(), points(7, 2, seed=1).half(), points(7, 1, seed=2)[:, 0]
    y = kl.kernel_logsumexp(LOG, a, b, s=0.5, col_potential=g)
    torch.testing.assert_close(y, wanted(a.float(), b.float(), 0.5, 0.0, g))
    assert kl.kernel_logsumexp(LOG, a, b, s=0.5, col_potential=g.half()).dtype == torch.half


A, B = torch.zeros(5, 2), torch.zeros(7, 2)
BAD = {
    "length": ({"col_potential": torch.zeros(6)}, ValueError, "each of the 7 points of b"),
    "rows": ({"row_potential": torch.zeros(7)}, ValueError, "each of the 5 points of a"),
    "dimensions": ({"row_potential": torch.zeros(1, 1, 5)}, ValueError, "(M,) or (L, M)"),
    "dtype": ({"col_potential": torch.zeros(7, dtype=DOUBLE)}, TypeError, "torch.float32"),
    "number": ({"col_potential": 1.0}, TypeError, "col_potential must be a tensor"),
    "device": ({"row_potential": torch.zeros(5, device="meta")}, ValueError, "device cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_potentials(name):
    values, error, text = BAD[name]
    with pytest.raises(error, match=re.escape(text)):
        kl.kernel_logsumexp(LOG, A, B, s=1.0, **values)


def test_batches_must_agree():
    two, three = torch.zeros(2, 5, 2), torch.zeros(3, 7)
    with pytest.raises(ValueError, match="inputs: 2, col_potential: 3"):
        kl.kernel_logsumexp(LOG, two, B, s=1.0, col_potential=three)
    with pytest.raises(ValueError, match="row_potential: 3"):
        kl.kernel_logsumexp(LOG, two, B, s=1.0, row_potential=torch.zeros(3, 5))


def test_other_functions_say_who_takes_them():
    for function in (kl.kernel_sum, kl.kernel_min):
        with pytest.raises(TypeError, match="argument of kernel_logsumexp"):
            function(LOG, A, B, s=1.0, col_potential=torch.zeros(7))
