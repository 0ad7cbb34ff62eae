"""Gradients of formulas, and theirs, beside differences."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import kernlib as kl
from tests.families.pairwise.formula import plain

X, Y = ("row", "feature"), ("col", "feature")
ALL = {"x": X, "y": Y, "s": "row", "t": "col", "p": ("row", "col"), "g": "feature", "c": ()}
# One that reads a tensor of each kind of axes, inside of sums and outside; and others.
FORMULAS = {
    "exp(-sum(g * (x - y) ** 2) / (s + t)) * p + c * s": ALL,
    "sum(p * x * y / s) * t + sum(sin(c * x) * g)": ALL,
    "sum(x * y) ** 2 * sum(u * w) - c": {"x": X, "y": Y, "u": X, "w": Y, "c": ()},
    "where(row > col, s * t, sum(abs(x - y), 1, 3))": {"x": X, "y": Y, "s": "row", "t": "col"},
    "log(s + row) * t ** c": {"s": "row", "t": "col", "c": ()},
}
REDUCTIONS = {
    "matrix": lambda f, v, values: kl.run_kernel(f, **values),
    "matmul": lambda f, v, values: kl.kernel_matmul(f, v=v, **values),
    "matmul of a vector": lambda f, v, values: kl.kernel_matmul(f, v=v[:, 0], **values),
    "batched matmul": lambda f, v, values: kl.kernel_matmul(f, v=torch.stack([v, 2 * v]), **values),
    "sum": lambda f, v, values: kl.kernel_sum(f, **values),
    "logsumexp": lambda f, v, values: kl.kernel_logsumexp(f, **values),
    "min": lambda f, v, values: kl.kernel_min(f, **values)[0],
    "largest": lambda f, v, values: kl.kernel_topk(f, k=2, largest=True, **values)[0],
}


def recorded(axes, batch=()) -> dict[str, torch.Tensor]:
    return {k: t.requires_grad_() for k, t in plain.drawn(axes, 3, batch).items()}


@pytest.mark.few(40)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("text", FORMULAS)
@pytest.mark.parametrize("batch", [(), ("x", "s", "p", "g")])
def test_gradients_of_two_orders(text, reduction, batch):
    formula, values = kl.Formula(text, FORMULAS[text]), recorded(FORMULAS[text], batch)
    v = torch.randn(plain.N, 2, dtype=torch.float64, requires_grad=True)

    def call(v, *tensors):
        return REDUCTIONS[reduction](formula, v, dict(zip(values, tensors, strict=True)))

    tensors = (v, *values.values())
    assert gradcheck(call, tensors, fast_mode=True)
    if reduction not in ("min", "largest"):
        assert gradgradcheck(call, tensors, fast_mode=True, atol=1e-4)


def test_third_order():
    formula = kl.Formula("exp(-sum((x - y) ** 2) / s)", {"x": X, "y": Y, "s": "row"})
    values = recorded({"x": X, "y": Y, "s": "row"})

    def slope(x, y, s):
        total = kl.kernel_sum(formula, x=x, y=y, s=s).sum()
        return torch.autograd.grad(total, (x, s), create_graph=True)

    assert gradgradcheck(slope, tuple(values.values()), fast_mode=True, atol=1e-4)


def test_what_has_no_gradient():
    axes = {"i": "row", "t": "col", "q": "col"}
    formula = kl.Formula("where(q, i * t, 0)", axes)
    values = plain.drawn(axes)
    values["t"].requires_grad_()
    result = kl.kernel_sum(formula, **values)
    result.sum().backward()
    expected = torch.where(values["q"], values["i"].sum(), 0).double()
    torch.testing.assert_close(values["t"].grad, expected)
    out = torch.empty_like(result)
    with pytest.raises(RuntimeError, match="out takes no gradient"):
        kl.run_kernel(formula, out=out, **values)
    with torch.no_grad():
        kl.run_kernel(formula, out=torch.empty(5, 7, dtype=torch.float64), **values)


def test_a_scalar_of_whole_numbers_and_one_of_another_dtype():
    axes = {"s": "row", "t": "col", "c": ()}
    formula = kl.Formula("s * t ** c", axes)
    s, t = torch.rand(3), torch.rand(4) + 0.5
    c = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    kl.kernel_sum(formula, s=s, t=t, c=c).sum().backward()
    exact = (s[:, None] * t**2 * t.log()).sum().double()
    torch.testing.assert_close(c.grad, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_have_the_dtype_of_their_tensors(dtype):
    axes = {"x": X, "y": Y, "s": "row"}
    formula, values = kl.Formula("exp(-sum((x - y) ** 2) / s)", axes), plain.drawn(axes)
    exact = {k: t.clone().to(dtype).double().requires_grad_() for k, t in values.items()}
    values = {k: t.to(dtype).requires_grad_() for k, t in values.items()}
    kl.kernel_sum(formula, **values).sum().backward()
    kl.kernel_sum(formula, **exact).sum().backward()
    for name, t in values.items():
        assert t.grad.dtype == dtype
        torch.testing.assert_close(t.grad.double(), exact[name].grad, rtol=0.05, atol=0.05)
