"""Derivatives of norms and bandwidths of any magnitude, against float64."""

import pytest
import torch

import kernlib as kl
from tests.families.pairwise import bandwidths, norms


@pytest.mark.few(6)
@pytest.mark.parametrize("kernel", (False, True), ids=("distance", "kernel"))
@pytest.mark.parametrize("kind", ("", "equal", "near", "one feature"))
@pytest.mark.parametrize("scale", norms.MAGNITUDES)
@pytest.mark.parametrize("p", norms.EXPONENTS)
def test_slopes_of_norms_at_any_magnitude(p, scale, kind, kernel):
    norms.check_gradients(kind, p, scale, kernel)


@pytest.mark.few(4)
@pytest.mark.parametrize("scale", norms.MAGNITUDES)
@pytest.mark.parametrize("learned", (False, True))
@pytest.mark.parametrize("p", norms.EXPONENTS)
def test_gradients_of_slopes_and_of_a_learned_exponent_at_any_magnitude(p, learned, scale):
    a, b = norms.points("", scale, m=6, n=5, k=4)
    # Fixed, as the gradient by p is one sum, of which other numbers may leave next to nothing.
    draw = torch.Generator().manual_seed(1)
    g, along = torch.randn(6, 5, generator=draw), torch.randn(6, 4, generator=draw)

    def derivatives(function, dtype):
        given = [t.to(dtype).requires_grad_() for t in (a, b, g, torch.tensor(p))]
        x, z, weights, exponent = given
        out = function(x, z, exponent if learned else p)
        leaves = (x, exponent) if learned else (x,)
        first = torch.autograd.grad(out, leaves, weights, create_graph=True)
        given = given if learned else given[:3]
        second = torch.autograd.grad((first[0] * along).sum(), given)
        return (*first, *second)

    wanted = derivatives(norms.norms, torch.float64)
    for one, other in zip(derivatives(kl.cdist, torch.float32), wanted, strict=True):
        assert (one.double() - other).abs().max() <= 1e-5 * max(1, p) * other.abs().max()


@pytest.mark.few(6)
@pytest.mark.parametrize("second", (False, True), ids=("first", "second"))
@pytest.mark.parametrize("how", ("number", "tensor", "several"))
@pytest.mark.parametrize("exponent", bandwidths.EXPONENTS)
@pytest.mark.parametrize("name", bandwidths.KERNELS)
def test_kernels_and_gradients_of_a_bandwidth_of_any_magnitude(name, exponent, how, second):
    bandwidths.check(name, how, exponent, second=second)


@pytest.mark.parametrize("scale", (1e-30, 1e-3, 1e4, 1e30))
@pytest.mark.parametrize("p", (1.5, 7.3))
def test_so_are_reductions_and_averages_of_outer_products(p, scale):
    norms.check_sums(p, scale)
    a, b = norms.points("near", scale)
    c = torch.randn(3, len(b), generator=torch.Generator().manual_seed(2))
    v, n = a.double()[:, None] - b.double(), norms.norms(a, b, p)
    slopes = v.sign() * torch.where(v == 0, 1.0, v.abs() / n[..., None]) ** (p - 1)
    slopes = torch.einsum("ot,qtk->oqk", c.double(), slopes).flatten(0, 1)
    wanted = slopes.mT @ slopes / len(slopes)
    found = kl.agop(kl.p_distance(), a, b, c, p=p)
    assert (found - wanted).abs().max() <= 3e-6 * wanted.abs().max()
