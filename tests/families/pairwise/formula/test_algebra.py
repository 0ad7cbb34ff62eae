"""Descriptors as formulas, and sums, products and powers of them, beside their parts."""

from __future__ import annotations

import pickle

import pytest
import torch

import kernlib as kl
from kernlib.descriptors.text import from_text
from kernlib.families.pairwise.formula.algebra import formula_of

A = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(4, 10).sin()
B = torch.linspace(0, 3, 50, dtype=torch.float64).reshape(5, 10).cos()
B[0] = A[0]  # a pair without a distance
NUMBERS = {"bandwidth": 1.5, "alpha": 0.7, "p": 1.5, "q": 0.8, "gamma": 0.3, "offset": 0.5,
           "inner_scale": -0.2, "gain": 1.2, "outer_p": 0.7, "inner_p": 1.5}  # fmt: skip
DESCRIPTORS = {
    **{name: getattr(kl, name)() for name in (
        "l1_distance", "l2_distance", "squared_distance", "p_distance", "power_sum",
        "exp_power_sum", "dot_product", "laplace_l1", "laplace_l2", "laplace_pq", "gaussian",
        "matern32", "matern52", "rational_quadratic", "cauchy", "polynomial")},
    "powers": kl.Pairwise(inner=kl.Square(), outer=kl.Power()),
    "logarithms": kl.Pairwise(inner=kl.PowerLog()),
    "absolute": kl.Pairwise("dot", inner=kl.Identity(), outer=kl.Abs()),
    "squares of sums": kl.Pairwise(inner=kl.Identity(), outer=kl.Square()),
    "several epilogues": kl.l2_distance(epilogue=(kl.Scale("gain"), kl.Tanh(), kl.Relu())),
    "activations": kl.dot_product(epilogue=(kl.Gelu(), kl.Sigmoid(), kl.Silu(), kl.LeakyRelu())),
    "custom": kl.dot_product(epilogue=kl.Custom("max(v, gain) ** 2 - min(v, 1)", ("gain",))),
}  # fmt: skip


def numbers_of(descriptor) -> dict:
    return {name: NUMBERS[name] for name in descriptor.required}


@pytest.mark.few(40)
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_a_descriptor_is_its_formula(name):
    descriptor = DESCRIPTORS[name]
    made, numbers = formula_of(descriptor), numbers_of(descriptor)
    torch.testing.assert_close(
        kl.run_kernel(made, A, B, **numbers), kl.run_kernel(descriptor, A, B, **numbers)
    )
    some = [7, 0, 1, 2, 9]
    if not name.startswith(
        ("several", "activ", "custom", "powers", "logar", "absol", "squares of")
    ):
        made = getattr(kl, name)(features=some)
        expected = kl.run_kernel(descriptor, A[:, some], B[:, some], **numbers)
        torch.testing.assert_close(kl.run_kernel(made, A, B, **numbers), expected)


def test_p_of_0_and_bandwidths_by_tensors():
    made = formula_of(kl.p_distance())
    expected = kl.run_kernel(kl.p_distance(), A, B, p=0.0)
    torch.testing.assert_close(kl.run_kernel(made, A, B, p=0.0), expected)
    width = torch.tensor(1.5, dtype=torch.float64)
    expected = kl.run_kernel(kl.gaussian(), A, B, bandwidth=width)
    made = formula_of(kl.gaussian())
    torch.testing.assert_close(kl.run_kernel(made, A, B, bandwidth=width), expected)


def test_sums_and_products_are_those_of_their_parts():
    kernel = kl.gaussian(features=range(8)) * kl.matern52(features=[8, 9]) + 0.5
    assert kernel.required == ("bandwidth_1", "bandwidth_2")
    widths = torch.tensor([1.1, 0.7], dtype=torch.float64, requires_grad=True)
    result = kl.run_kernel(kernel, A, B, bandwidth_1=widths[0], bandwidth_2=widths[1])
    left = kl.run_kernel(kl.gaussian(), A[:, :8], B[:, :8], bandwidth=widths[0])
    right = kl.run_kernel(kl.matern52(), A[:, 8:], B[:, 8:], bandwidth=widths[1])
    expected = left * right + 0.5
    torch.testing.assert_close(result, expected)
    weights = torch.arange(20, dtype=torch.float64).reshape(4, 5)
    (found,) = torch.autograd.grad((weights * result).sum(), widths)
    (exact,) = torch.autograd.grad((weights * expected).sum(), widths)
    torch.testing.assert_close(found, exact)


def test_nested_combinations_number_on():
    part = kl.gaussian() + kl.cauchy()
    whole = (2 * part + kl.laplace_l1()) ** 2 * part
    assert set(whole.required) == {f"bandwidth_{i}" for i in range(1, 6)}
    widths = [0.5, 0.7, 0.9, 1.1, 1.3]
    numbers = {f"bandwidth_{i}": width for i, width in enumerate(widths, 1)}
    kinds = (kl.gaussian(), kl.cauchy(), kl.laplace_l1(), kl.gaussian(), kl.cauchy())
    g1, c2, l3, g4, c5 = (
        kl.run_kernel(kind, A, B, bandwidth=width)
        for kind, width in zip(kinds, widths, strict=True)
    )
    expected = (2 * (g1 + c2) + l3) ** 2 * (g4 + c5)
    torch.testing.assert_close(kl.run_kernel(whole, A, B, **numbers), expected)


def test_reductions_take_points_by_place():
    kernel, v = 3 * kl.gaussian() + kl.dot_product() ** 2, torch.ones(5, 2, dtype=torch.float64)
    matrix = kl.run_kernel(kernel, A, B, bandwidth=1.5)
    torch.testing.assert_close(
        matrix, 3 * kl.run_kernel(kl.gaussian(), A, B, bandwidth=1.5) + (A @ B.T) ** 2
    )
    torch.testing.assert_close(kl.kernel_matmul(kernel, A, B, v, bandwidth=1.5), matrix @ v)
    torch.testing.assert_close(kl.kernel_matmul(kernel, A, b=B, v=v, bandwidth=1.5), matrix @ v)
    torch.testing.assert_close(kl.kernel_sum(kernel, A, B, bandwidth=1.5), matrix.sum(1))
    assert torch.equal(kl.kernel_argmin(kernel, A, B, bandwidth=1.5), matrix.argmin(1))
    torch.testing.assert_close(kl.kernel_topk(kernel, A, B, 2, bandwidth=1.5)[0],
                               matrix.topk(2, largest=False)[0])  # fmt: skip


def test_feature_maps_and_lengthscales_change_points():
    kernel, scales = kl.gaussian() + kl.cauchy(), torch.linspace(0.5, 2, 10, dtype=torch.float64)
    numbers = {"bandwidth_1": 1.0, "bandwidth_2": 2.0}
    expected = kl.run_kernel(kernel, A / scales, B / scales, **numbers)
    torch.testing.assert_close(kl.run_kernel(kernel, A, B, lengthscale=scales, **numbers), expected)
    torch.testing.assert_close(
        kl.run_kernel(kernel, A, B, feature_map=torch.diag(1 / scales), **numbers), expected
    )


def test_an_epilogue_that_reads_tensors_makes_a_formula():
    axes = {"s_i": "row", "s_j": "col", "w_j": "col"}
    kernel = kl.squared_distance(epilogue=kl.Custom("exp(-v / (s_i * s_j)) * w_j", axes=axes))
    s, t, w = A[:, 0].abs() + 1, B[:, 0].abs() + 1, B[:, 1]
    squares = torch.cdist(A, B) ** 2
    torch.testing.assert_close(
        kl.run_kernel(kernel, A, B, s_i=s, s_j=t, w_j=w), (-squares / (s[:, None] * t)).exp() * w
    )
    several = kl.l2_distance(
        epilogue=(kl.Gaussian(), kl.Custom("gain * v + s", ("gain",), {"s": ("row", "col")}))
    )
    result = kl.run_kernel(several, A, B, bandwidth=1.5, gain=2.0, s=squares)
    torch.testing.assert_close(result, 2 * (-torch.cdist(A, B) / 4.5).exp() + squares)


def test_what_makes_no_formula_says_why():
    assert kl.gaussian(features=None) == kl.gaussian()
    with pytest.raises(TypeError, match="a is passed by place and by name"):
        kl.run_kernel(kl.gaussian(features=[0]), A, B, a=A, bandwidth=1.0)
    with pytest.raises(ValueError, match="symmetric=True is of Pairwise alone"):
        kl.gaussian(features=range(2), symmetric=True)
    with pytest.raises(ValueError, match="places of features from 0 on"):
        kl.gaussian(features=[1, 1])
    with pytest.raises(TypeError, match="features must be a range or a list of ints"):
        kl.gaussian(features="12")
    with pytest.raises(TypeError, match="must be a Pairwise, a Formula or a number, got"):
        kl.gaussian() + torch.ones(())
    with pytest.raises(ValueError, match="categories"):
        kl.gaussian(categories=2) + kl.gaussian()
    with pytest.raises(ValueError, match="reads tensors of rows and columns"):
        kl.KroneckerSparse(1, 2, 2, 1, epilogue=kl.Custom("v + s", axes={"s": "row"}))
    with pytest.raises(ValueError, match="a sum reads the features 8 to 9, got a 4"):
        kl.run_kernel(kl.gaussian(features=[8, 9]), A[:, :4], B, bandwidth=1.0)


def test_formulas_are_copied_by_their_text():
    for made in (kl.gaussian() * kl.cauchy(), kl.Formula("s * t", {"s": "row", "t": ("col",)})):
        assert pickle.loads(pickle.dumps(made)) == from_text(made.text) == made
        assert hash(from_text(made.text)) == hash(made)
    custom = kl.Custom("v + s", axes={"s": "row"})
    assert pickle.loads(pickle.dumps(custom)) == custom
    assert repr(kl.Custom("2 * v")) == "Custom(expression='2 * v', parameters=())"
