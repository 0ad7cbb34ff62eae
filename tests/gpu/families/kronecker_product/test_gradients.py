"""Gradients by x and by factors on the GPU against float64."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.gpu.families.kronecker_product import cases
from tests.gpu.families.kronecker_product.cases import (
    BF16,
    F16,
    F32,
    F64,
    SHAPES,
    SIDES,
    TYPES,
    exact,
    operands,
    product,
)
from tests.gpu.watched import launches

# Beside those of products: terms of a gradient have all signs, and cancel.
GATES = {F64: 4e-13, F32: 4e-6, F16: 2e-3, BF16: 1.6e-2}
every_side = pytest.mark.parametrize("side", SIDES)


def check(descriptor, tensors, gate: float, grad=None) -> list[torch.Tensor]:
    """Gradients of all that require one, which it returns."""
    y = kl.run_kernel(descriptor, *tensors)
    grad = torch.randn_like(y) if grad is None else grad(y)
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad(y, wanted, grad)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    turned = [f.mT if flag else f for f, flag in zip(wide[1:], descriptor.transposed, strict=True)]
    whole = exact(wide[0], turned, descriptor.side)
    theirs = torch.autograd.grad(whole, [t for t in wide if t.requires_grad], grad.double())
    terms = exact(wide[0].abs(), [t.abs() for t in turned], descriptor.side)
    size = max(whole.norm(), terms.norm() / descriptor.in_features**0.5)
    as_a_rule = (grad.double().norm() * size / whole.numel() ** 0.5).item()
    for t, one, other in zip(wanted, found, theirs, strict=True):
        assert one.shape == other.shape
        # Terms may cancel in few numbers: beside what these add up to as a rule.
        least = as_a_rule * t.numel() ** 0.5 / t.double().norm()
        assert (one.double() - other).norm() <= gate * max(other.norm(), least)
    return found


@every_side
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("shapes", SHAPES, ids=lambda s: f"{len(s)}x{s[0][0]}x{s[0][1]}")
def test_gradients(shapes, numbers, side, seed):
    dtype, descriptor = TYPES[numbers], product(shapes, side)
    made = [operands(shapes, rows, side, dtype) for rows in (1, 7, 300)]
    made = [[t.requires_grad_() for t in tensors] for tensors in made]
    cases.build([(descriptor, tensors) for tensors in made])
    for tensors in made:
        check(descriptor, tensors, GATES[dtype])


@every_side
def test_they_are_kernels_and_nothing_else(side, seed):
    tensors = [t.requires_grad_() for t in operands(((8, 8), (5, 7)), 50, side, F32)]
    y = kl.kron_matmul(tensors[0], tensors[1:], side=side)
    with launches() as launched:
        torch.autograd.grad(y, tensors, torch.randn_like(y))
    assert [name.split()[1] for name in launched] == ["gradients", "sum"]


@every_side
def test_strides_and_batches(side, seed):
    shapes = ((6, 5), (4, 8), (2, 2))
    descriptor = product(shapes, side, transposed=(True, False, False))
    for batch, own in (((), ()), ((3,), ()), ((2, 3), (3,)), ((2, 3), (2, 3))):
        x, *factors = operands(shapes, 9, side, F32, batch)
        factors = [f[(0,) * len(batch)].expand(*own, -1, -1).clone() for f in factors]
        factors[0] = factors[0].mT.contiguous()
        factors[1] = torch.nn.functional.pad(factors[1], (1, 2))[..., 1:-2]
        wide = torch.randn(*x.shape[:-1], x.shape[-1] + 3, device="cuda")
        for given in (x, x.mT.contiguous().mT, wide[..., 1:-2]):
            tensors = [t.detach().requires_grad_() for t in (given, *factors)]
            for grad in (None, lambda y: torch.randn_like(y.mT).mT, torch.ones_like):
                check(descriptor, tensors, GATES[F32], grad)


@every_side
def test_tf32_is_what_is_permitted(side, seed):
    shapes = ((64, 64), (16, 16))
    tensors = [t.requires_grad_() for t in operands(shapes, 100, side, F32)]
    for precision, gate in (("tf32", 3e-3), ("fp32", GATES[F32])):
        check(product(shapes, side, precision=precision), tensors, gate)


def test_positive_sums_of_many_rows_do_not_drift(seed):
    """A tensor core's additions truncate, and all rows are one sum."""
    for precision, gate in (("fp32", GATES[F32]), ("tf32", 3e-4)):
        shapes = ((16, 16), (16, 16))
        tensors = [t.abs().requires_grad_() for t in operands(shapes, 40000, "right", F32)]
        check(product(shapes, precision=precision), tensors, gate, torch.ones_like)


def test_only_what_is_needed(seed):
    shapes = ((16, 16), (8, 4))
    for wanted in ((False, True, True), (False, False, True), (True, True, False)):
        tensors = operands(shapes, 90, "right", F32)
        tensors = [t.requires_grad_(flag) for t, flag in zip(tensors, wanted, strict=True)]
        check(product(shapes), tensors, GATES[F32])


@pytest.mark.parametrize("shapes", [((32, 32), (32, 32)), ((2, 2),) * 7, ((16, 16),) * 4])
def test_the_same_bits_each_time(shapes, seed):
    tensors = [t.requires_grad_() for t in operands(shapes, 500, "right", F32)]
    y = kl.kron_matmul(tensors[0], tensors[1:])
    grad = torch.randn_like(y)
    first = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(y, tensors, grad, retain_graph=True)
        assert all(map(torch.equal, first, again))


def test_gradients_of_gradients(seed):
    tensors = [t.requires_grad_() for t in operands(((4, 3), (2, 2)), 5, "right", F64)]
    assert torch.autograd.gradcheck(lambda x, *f: kl.kron_matmul(x, f), tensors)
    assert torch.autograd.gradgradcheck(lambda x, *f: kl.kron_matmul(x, f), tensors)
