"""Layouts, batches, hyperparameters and outputs on the GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import kernlib as kl
from tests.gpu.families.pairwise.cases import check, points, reference, relative_error

pytestmark = pytest.mark.usefixtures("either")


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values as ``x`` (..., N, K) in every layout that selects a way of loading."""
    *batch, n, k = x.shape
    padded = torch.full((*batch, n + 3, k + 4), math.nan, dtype=x.dtype, device="cuda")
    padded[..., :n, :k] = x
    odd = torch.full((*batch, n, k + 1), math.nan, dtype=x.dtype, device="cuda")
    odd[..., :k] = x
    shifted = torch.full((*batch, n, k + 3), math.nan, dtype=x.dtype, device="cuda")
    shifted[..., 1 : k + 1] = x
    wide = torch.full((*batch, n, 3 * k), math.nan, dtype=x.dtype, device="cuda")
    wide[..., ::3] = x
    columns = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    tall = torch.full((*batch, k, n + 4), math.nan, dtype=x.dtype, device="cuda")
    tall[..., :n] = x.transpose(-1, -2)
    skipped = torch.full((*batch, 2 * n, k), math.nan, dtype=x.dtype, device="cuda")
    skipped[..., ::2, :] = x
    return {
        "rows": x.contiguous(),
        "padded rows": padded[..., :n, :k],
        "odd rows": odd[..., :k],
        "shifted rows": shifted[..., 1 : k + 1],
        "step in features": wide[..., ::3],
        "columns": columns,
        "padded columns": tall[..., :n].transpose(-1, -2),
        "step in points": skipped[..., ::2, :],
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", ((132, 96, 20), (131, 67, 19), (260, 136, 144)), ids=str)
@pytest.mark.parametrize("batch", ((), (2,)), ids=("2-D", "3-D"))
def test_every_layout_of_inputs_gives_the_same(dtype, shape, batch, seed):
    m, n, k = shape
    a, b = points(*batch, m, k, dtype=dtype), points(*batch, n, k, dtype=dtype)
    wanted = check(kl.l1_distance(), a, b)
    others = layouts(b)
    for name, x in layouts(a).items():
        for other, y in others.items():
            out = kl.run_kernel(kl.l1_distance(), x, y)
            assert torch.equal(out, wanted), (name, other)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16), ids=str)
@pytest.mark.parametrize("shape", ((132, 96, 20), (131, 67, 19)), ids=str)
@pytest.mark.parametrize("signed", (False, True))
def test_every_layout_of_out_is_filled_and_nothing_else(dtype, shape, signed, seed):
    m, n, k = shape
    a, b = points(m, k, dtype=dtype), points(n, k, dtype=dtype)
    descriptor = kl.Pairwise(inner=kl.Identity()) if signed else kl.laplace_l1()
    arguments = {} if signed else {"bandwidth": 20.0, "regularization": 0.5, "row_offset": 3}
    wanted = kl.run_kernel(descriptor, a, b, **arguments)
    target = reference(descriptor, a, b, **arguments)
    assert (wanted.double().cpu() - target).abs().max() <= 2e-2
    for name, view in layouts(torch.zeros_like(wanted)).items():
        whole = view._base if view._base is not None else view
        whole.fill_(math.nan)
        kl.run_kernel(descriptor, a, b, out=view, **arguments)
        assert torch.equal(view, wanted), name
        assert whole.isnan().sum() == whole.numel() - view.numel(), name


def test_accumulate_adds(seed):
    a, b = points(140, 33), points(90, 33)
    for out in layouts(points(140, 90)).values():
        before = out.clone()
        kl.run_kernel(kl.gaussian(), a, b, out=out, accumulate=True, bandwidth=5.0)
        wanted = before + kl.run_kernel(kl.gaussian(), a, b, bandwidth=5.0)
        assert torch.allclose(out, wanted, rtol=1e-6, atol=1e-6)


BATCHES = (
    ((3, 40, 9), (3, 50, 9)),
    ((1, 40, 9), (3, 50, 9)),
    ((40, 9), (3, 50, 9)),
    ((3, 40, 9), (50, 9)),
    ((40, 9), (50, 9)),
)


@pytest.mark.parametrize("a_shape, b_shape", BATCHES)
def test_batches_and_hyperparameters_equal_a_loop(a_shape, b_shape, seed):
    a, b = points(*a_shape), points(*b_shape)
    bandwidth = torch.tensor([2.0, 3.0, 4.0], device="cuda")
    p = torch.tensor([1.0, 1.3, 2.0], device="cuda")
    out = kl.run_kernel(kl.p_distance(epilogue=kl.Laplace()), a, b, p=p, bandwidth=bandwidth)
    assert out.shape == (3, 40, 50)
    for entry in range(3):
        x, y = (t if t.dim() == 2 else t[entry % t.shape[0]] for t in (a, b))
        one = kl.run_kernel(
            kl.p_distance(epilogue=kl.Laplace()), x, y,
            p=float(p[entry]), bandwidth=float(bandwidth[entry]),
        )  # fmt: skip
        assert relative_error(out[entry], one) <= 5e-6


@pytest.mark.parametrize("form", (
    3, 3.0, np.float32(3), np.int64(3), torch.tensor(3.0), torch.tensor(3), torch.tensor([3.0]),
    torch.tensor(3.0, device="cuda") if torch.cuda.is_available() else None,
    torch.tensor([3], device="cuda") if torch.cuda.is_available() else None,
    torch.tensor([3.0], device="cuda").expand(2) if torch.cuda.is_available() else None,
), ids=repr)  # fmt: skip
def test_one_number_in_every_form(form, seed):
    a, b = points(2, 70, 12), points(2, 60, 12)
    wanted = kl.run_kernel(kl.gaussian(), a, b, bandwidth=3.0)
    assert torch.equal(kl.run_kernel(kl.gaussian(), a, b, bandwidth=form), wanted)


@pytest.mark.parametrize("row_offset, col_offset", ((0, 0), (5, 0), (0, 7), (130, 100), (-3, 400)))
def test_regularization_finds_the_diagonal_of_blocks(row_offset, col_offset, seed):
    a, b = points(300, 9), points(280, 9)
    arguments = {"bandwidth": 3.0, "row_offset": row_offset, "col_offset": col_offset}
    plain = kl.run_kernel(kl.laplace_l1(), a, b, **arguments)
    wanted = plain.clone()
    m, n = torch.arange(300, device="cuda"), torch.arange(280, device="cuda")
    wanted[(m[:, None] + row_offset) == (n[None] + col_offset)] += 0.25
    for out in (torch.empty(300, 280, device="cuda"), torch.empty(280, 300, device="cuda").T):
        kl.run_kernel(kl.laplace_l1(), a, b, out=out, regularization=0.25, **arguments)
        assert torch.equal(out, wanted)


def test_epsilon_counts_small_values_as_zero(seed):
    a = points(40, 6, scale=1e-6)
    default = kl.run_kernel(kl.laplace_l1(), a, a, bandwidth=1e-6)
    assert (default < 1).any()
    snapped = kl.run_kernel(kl.laplace_l1(), a, a, bandwidth=1e-6, epsilon=1e-4)
    assert (snapped == 1).all()
    negative = kl.run_kernel(
        kl.dot_product(epilogue=kl.Laplace()), points(20, 6), points(20, 6), bandwidth=1.0
    )
    assert (negative > 1).any()


@pytest.mark.parametrize("shape", ((0, 5, 7), (5, 0, 7), (5, 6, 0), (0, 0, 0)))
def test_empty_inputs(shape, seed):
    m, n, k = shape
    out = kl.run_kernel(kl.laplace_l1(), points(m, k), points(n, k), bandwidth=2.0)
    assert out.shape == (m, n)
    assert (out == 1).all()
    assert kl.run_kernel(kl.l1_distance(), points(0, m, k), points(0, n, k)).shape == (0, m, n)


def test_negated_views_keep_their_sign(seed):
    z = torch.randn(50, 9, dtype=torch.complex64, device="cuda").conj()
    b = points(40, 9)
    assert z.imag.is_neg()
    out = kl.run_kernel(kl.dot_product(), z.imag, b)
    assert relative_error(out, reference(kl.dot_product(), z.imag.resolve_neg(), b)) <= 1e-6
    target = torch.zeros(50, 40, dtype=torch.complex64, device="cuda").conj().imag
    with pytest.raises(ValueError, match="out is a negated view"):
        kl.run_kernel(kl.dot_product(), z.imag.clone(), b, out=target)


def test_writing_to_out_is_seen_by_autograd(seed):
    out = torch.empty(40, 40, device="cuda")
    before = out._version
    kl.run_kernel(kl.l1_distance(), points(40, 9), points(40, 9), out=out)
    assert out._version > before


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("where", ("cuda", "cpu"))
def test_a_value_of_each_point_is_told_from_a_batch(dtype, where, seed):
    a, wide = points(40, 9, dtype=dtype), torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.linspace(0.5, 2.0, 40, dtype=wide, device=where)
    bound = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    with pytest.raises(ValueError, match=r"pass shape \(40, 1, 1\)"):
        kl.run_kernel(kl.gaussian(), a, a, bandwidth=values)
    batch = kl.run_kernel(kl.gaussian(), a, a, bandwidth=values[:, None, None])
    for l in (0, 39):
        one = kl.run_kernel(kl.gaussian(), a, a, bandwidth=float(values[l]))
        assert relative_error(batch[l], one.double()) <= bound
    k = kl.run_kernel(kl.gaussian(), a, a, bandwidth=3.0, regularization=values)
    plain = kl.run_kernel(kl.gaussian(), a.double(), a.double(), bandwidth=3.0)
    wanted = plain + torch.diag(values.double().to("cuda"))
    assert relative_error(k, wanted) <= bound
    product = kl.kernel_matmul(kl.gaussian(), a, a, a, bandwidth=3.0, regularization=values)
    assert relative_error(product, wanted @ a.double()) <= 2 * bound
