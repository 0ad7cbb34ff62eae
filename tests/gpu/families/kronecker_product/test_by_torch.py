"""Products that torch computes on the GPU where that was measured to be faster, else by kernels."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib import events
from kernlib.families.kronecker_product.lowering import by_torch
from kernlib.jit import tuning
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.kronecker_product.cases import (
    F16,
    F32,
    F64,
    GATES,
    check,
    exact,
    operands,
    product,
)
from tests.gpu.watched import capture

# Rows and factors, whose products are of all kinds: one, batched, turned, and of neighbours that
# are multiplied out.
SHAPES = (
    (4, ((104, 59), (64, 37))),
    (3, ((130, 120),)),
    (21, ((47, 99), (14, 88), (24, 27))),
    (13, ((5, 13), (3, 12), (3, 87), (4, 23), (90, 3))),
    (1243, ((13, 2), (2, 22), (97, 3))),
)
every_shape = pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case[0]}")
every_dtype = pytest.mark.parametrize("dtype", [F32, F64], ids=["fp32", "fp64"])


def is_measured() -> bool:
    device = torch.cuda.current_device()
    return (arch_of(device), model(device).multiprocessors) == by_torch.GPU


@pytest.fixture
def heard():
    """Names of the events of a call."""
    found = []
    stop = events.subscribe(lambda event: found.append(event.name))
    yield found
    stop()


@every_dtype
@every_shape
def test_values(case, dtype, heard, seed):
    rows, shapes = case
    descriptor = product(shapes)
    x, *factors = operands(shapes, rows, "right", dtype)
    wanted = exact(x, factors, "right")
    check(kl.run_kernel(descriptor, x, *factors), wanted, GATES[dtype])
    if is_measured():
        assert set(heard) == {"torch"}
    out = torch.full_like(wanted, math.nan, dtype=dtype).mT.contiguous().mT
    assert kl.run_kernel(descriptor, x, *factors, out=out) is out
    check(out, wanted, GATES[dtype])
    wide = torch.randn(rows, x.shape[1] + 3, device="cuda").to(dtype)[:, 1:-2].copy_(x)
    turned = [f.mT.contiguous().mT for f in factors]
    check(kl.run_kernel(descriptor, wide, *turned), wanted, GATES[dtype])
    many = x.expand(2, *x.shape)
    check(kl.run_kernel(descriptor, many, *factors), wanted.expand(2, *wanted.shape), GATES[dtype])


@every_shape
def test_tf32_is_what_is_permitted(case, seed):
    """Whatever was permitted when the same call was made before."""
    rows, shapes = case
    x, *factors = operands(shapes, rows, "right", F32)
    wanted = exact(x, factors, "right")
    try:
        for setting in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(setting)
            check(kl.kron_matmul(x, factors, precision="fp32"), wanted, 1e-6)
            gate = 1e-6 if setting == "highest" else 1e-2
            check(kl.kron_matmul(x, factors), wanted, gate)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_float16_cannot_hold_is_kernels(heard, seed):
    rows, shapes = SHAPES[0]
    x, *factors = operands(shapes, rows, "right", F16)
    factors = [factors[0] * 2**-10, factors[1] * 2**10]
    x = x * 2**8
    check(kl.kron_matmul(x, factors), exact(x, factors, "right"), 2e-3)
    assert "torch" not in heard


@every_dtype
def test_alpha_beta_y_and_an_epilogue(dtype, seed):
    rows, shapes = SHAPES[2]
    x, *factors = operands(shapes, rows, "right", dtype)
    wanted = exact(x, factors, "right")
    y = torch.randn(wanted.shape, device="cuda").to(dtype)
    apart = 3 * wanted - y.double() / 2
    beta = torch.tensor(-0.5, device="cuda")
    check(kl.kron_matmul(x, factors, alpha=3.0, beta=beta, y=y), apart, 2 * GATES[dtype])
    assert kl.kron_matmul(x, factors, alpha=3.0, beta=beta, y=y, out=y) is y
    check(y, apart, 2 * GATES[dtype])
    descriptor = product(shapes, epilogue=(kl.Bias(), kl.Relu()))
    bias = torch.randn(descriptor.out_features, device="cuda").to(dtype)
    found = kl.run_kernel(descriptor, x, *factors, bias=bias)
    check(found, (wanted + bias.double()).relu(), 2 * GATES[dtype])


@every_dtype
def test_gradients_and_compiled_calls(dtype, seed):
    rows, shapes = SHAPES[0]
    x, *factors = operands(shapes, rows, "right", dtype)
    x.requires_grad_()
    y = kl.kron_matmul(x, factors)
    y.mul_(2)  # no view
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, grad)
    check(found, 2 * exact(grad, [f.mT for f in factors], "right"), 4 * GATES[dtype])
    with torch.no_grad():
        compiled = torch.compile(lambda x, *f: kl.kron_matmul(x, f) + 1, fullgraph=True)
        check(compiled(x, *factors), exact(x, factors, "right") + 1, 2 * GATES[dtype])


@every_shape
def test_autocast_rounds_nothing_of_float64(case, seed):
    rows, shapes = case
    x, *factors = operands(shapes, rows, "right", F64)
    with torch.autocast("cuda", F16):
        found = kl.kron_matmul(x, factors)
    assert found.dtype == F64
    check(found, exact(x, factors, "right"), GATES[F64])


@every_dtype
def test_neighbours_that_are_multiplied_out_are_captured(dtype, heard, seed):
    """Anew in each replay, whatever the factors are then; as views, and of batches of one."""
    rows, shapes = SHAPES[4]
    x, *factors = operands(shapes, rows, "right", dtype)
    views = [factors[0].mT.contiguous().mT, factors[1][None], factors[2]]
    descriptor = product(shapes)
    kl.prepare(descriptor, x, *views)
    with capture() as graph:
        found = kl.run_kernel(descriptor, x, *views)
    for _ in range(3):
        x.normal_()
        views[0].normal_()
        views[1].normal_()
        graph.replay()
        wanted = exact(x, [views[0], views[1][0], views[2]], "right")
        check(found.reshape(wanted.shape), wanted, GATES[dtype])
    if is_measured():
        assert set(heard) == {"torch"}


@pytest.mark.parametrize("case", [SHAPES[3], (226, ((5, 7), (29, 14), (6, 80), (41, 4)))], ids=str)
@every_dtype
def test_one_launch_and_several_give_the_same_bits(case, dtype, monkeypatch, seed):
    """So that it may depend on the rows which of both is faster."""
    rows, shapes = case
    x, *factors = operands(shapes, rows, "right", dtype)
    found = []
    for kind in ("modes", "slabs"):
        monkeypatch.setattr(tuning, "choice", lambda *_, kind=kind: {"kind": kind})
        forget_plans()
        found.append(kl.kron_matmul(x, factors))
    forget_plans()
    assert torch.equal(*found)
