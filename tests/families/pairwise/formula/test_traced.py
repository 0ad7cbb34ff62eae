"""Formulas inside of what traces, compiles, exports and transforms calls."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernlib as kl
from tests.families.pairwise.formula import plain

AXES = {"x": ("row", "feature"), "y": ("col", "feature"), "s": "row", "t": "col", "c": ()}
FORMULA = kl.Formula("exp(-sum((x - y) ** 2) / s) * t + c", AXES)
VALUES = plain.drawn(AXES)
CALLS = {
    "matrix": lambda v, **values: kl.run_kernel(FORMULA, **values),
    "matmul": lambda v, **values: kl.kernel_matmul(FORMULA, v=v, **values),
    "sum": lambda v, **values: kl.kernel_sum(FORMULA, **values),
    "logsumexp": lambda v, **values: kl.kernel_logsumexp(FORMULA, **values),
    "min": lambda v, **values: kl.kernel_min(FORMULA, **values)[0],
    "topk": lambda v, **values: kl.kernel_topk(FORMULA, k=2, **values)[0],
}
V = torch.linspace(-1, 1, 2 * plain.N, dtype=torch.float64).reshape(plain.N, 2)


def call_of(name):
    return lambda v, *tensors: CALLS[name](v, **dict(zip(AXES, tensors, strict=True)))


def slopes(call, tensors) -> list:
    tensors = [t.clone().requires_grad_() for t in tensors]
    result = call(*tensors)
    return [result, *torch.autograd.grad(result.sum(), tensors, allow_unused=True)]


@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls(name):
    call, tensors = call_of(name), (V, *VALUES.values())
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, exact in zip(slopes(compiled, tensors), slopes(call, tensors), strict=True):
        torch.testing.assert_close(found, exact) if exact is not None else None


@pytest.mark.parametrize("name", CALLS)
def test_traced_calls(name):
    call, tensors = call_of(name), (V, *VALUES.values())
    exact = call(*tensors)
    torch.testing.assert_close(make_fx(call, tracing_mode="symbolic")(*tensors)(*tensors), exact)
    with FakeTensorMode() as mode:
        fake = call(*map(mode.from_tensor, tensors))
    meta = call(*(t.to("meta") for t in tensors))
    assert (fake.shape, fake.dtype) == (meta.shape, meta.dtype) == (exact.shape, exact.dtype)


@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_torch_func(name):
    call, (v, x, *rest) = call_of(name), (V, *VALUES.values())

    def total(x):
        return (call(v, x, *rest) ** 2).sum()

    leaf = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(x), exact)
    several = torch.stack([x, 2 * x, x])
    mapped = torch.func.vmap(lambda x: call(v, x, *rest))(several)
    torch.testing.assert_close(mapped, torch.stack([call(v, z, *rest) for z in several]))
    beside = several.movedim(0, 1)
    mapped = torch.func.vmap(torch.func.grad(total), in_dims=1, out_dims=1)(beside)
    torch.testing.assert_close(mapped[:, 0], exact)
    batched = torch.func.vmap(lambda c: call(v, several, *rest[:-1], c))(torch.rand(4).double())
    assert batched.shape[:2] == (4, 3)
    twice = torch.func.jacrev(torch.func.jacrev(total))(x)
    torch.testing.assert_close(twice, torch.autograd.functional.hessian(total, x))
    if name in ("min", "topk"):
        tangent = torch.func.jvp(total, (x,), (torch.ones_like(x),))[1]
        torch.testing.assert_close(tangent, exact.sum())
    else:
        with pytest.raises(RuntimeError, match=r"forward mode .* use vjp or jacrev"):
            torch.func.jvp(total, (x,), (torch.ones_like(x),))


def test_batched_gradients_are_refused():
    x = VALUES["x"].clone().requires_grad_()
    result = kl.kernel_sum(FORMULA, **VALUES | {"x": x})
    with pytest.raises(RuntimeError, match=r"use torch\.func\.jacrev"):
        torch.autograd.grad(result, x, torch.eye(plain.M).double(), is_grads_batched=True)


def test_an_export_keeps_the_formula():
    class Kernel(torch.nn.Module):
        def forward(self, v, *tensors):
            return call_of("matmul")(v, *tensors)

    tensors = (V, *VALUES.values())
    program = torch.export.export(Kernel(), tensors)
    torch.testing.assert_close(program.module()(*tensors), call_of("matmul")(*tensors))


def test_numbers_of_the_host_are_constants_of_programs():
    kernel = kl.gaussian() + kl.dot_product()
    call = torch.compile(
        lambda x, y, width: kl.run_kernel(kernel, x, y, bandwidth=width),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    x, y = VALUES["x"], VALUES["y"]
    for width in (1.0, 2.0, 3.0):
        exact = (-(torch.cdist(x, y) ** 2) / (2 * width**2)).exp() + x @ y.T
        torch.testing.assert_close(call(x, y, width), exact)


def test_autocast_and_debug_change_no_value(capfd):
    exact = kl.kernel_sum(FORMULA, **VALUES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kl.kernel_sum(FORMULA, **VALUES), exact)
    assert torch.equal(kl.kernel_sum(FORMULA, debug=True, **VALUES), exact)
    assert "formula on cpu" in capfd.readouterr().err
