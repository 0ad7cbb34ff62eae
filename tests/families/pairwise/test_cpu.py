"""How CPU tensors are computed: by products of matrices, by torch.cdist and block by block, on
sizes at which these begin, against the formula in float64."""

import math

import pytest
import torch
from torch.autograd import forward_ad

import kernlib as kl
from tests.families.pairwise.cases import points
from tests.families.pairwise.forwards import FORWARDS
from tests.support import hostile, torch_settings
from tests.support.speeds import slow_but

EUCLIDEAN = ("cdist p=2.0", "power sum p=2.0", "gaussian", "laplace_l2", "matern32", "cauchy")
# (rows, columns, features): products by few passes and by their sides put together, in float64 of
# few features, and of more rows than a block has.
SIZES = ((61, 67, 40), (300, 260, 65), (300, 1030, 5), (1100, 1000, 17))
SWEEP = [(name, sizes) for name in EUCLIDEAN for sizes in SIZES]
FAST = (*((EUCLIDEAN[0], sizes) for sizes in SIZES[:3]), ("gaussian", SIZES[1]))
# One coordinate then decides, and a product rounds three of its squares.
HEAVY_TAILS = {**hostile.FORWARD, torch.float32: 4e-6}
GAUSSIAN = kl.gaussian()


def exact_gaussian(a, b, bandwidth):
    v = (b.double()[..., None, :, :] - a.double()[..., :, None, :]).square().sum(-1)
    return torch.exp(-v / (2 * bandwidth**2))


@pytest.mark.parametrize("which", slow_but(FAST, SWEEP), ids=str)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_products_meet_the_bar_on_hostile_points(which, dtype):
    name, (m, n, k) = which
    forward = FORWARDS[name]
    for case in hostile.cases(dtype, rows=m, columns=n, features=k):
        exact, terms = forward.exact(case)
        bars = HEAVY_TAILS if case.name == "heavy tails" else hostile.FORWARD
        found = forward.ours(case), exact, terms, forward.theirs(case)
        hostile.check(*found, where=f"{name}, {case.name}", bars=bars)


@pytest.mark.parametrize("p", (0.0, 1.0, 2.0, math.inf))
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_many_features_meet_the_bar(p, dtype):
    """Which torch.cdist adds up one after the other."""
    forward = FORWARDS[f"cdist p={p}"]
    for name in ("normal", "duplicates"):
        case = hostile.case(name, dtype, rows=5, columns=7, features=3001)
        exact, terms = forward.exact(case)
        hostile.check(forward.ours(case), exact, terms, None, f"{p}, {name}")


@pytest.mark.parametrize("features", (3, 40))
def test_points_from_themselves_are_0_and_from_near_ones_exact(features):
    """Also where the two are one tensor, whose diagonal is never looked at."""
    a = points(400, features) + 100
    b = a.clone()
    b[::7] += 1e-4 * points(58, features, seed=1)
    for second in (a, b, a.clone()):
        found = kl.run_kernel(kl.squared_distance(), a, second)
        wanted = (second.double()[None] - a.double()[:, None]).square().sum(-1)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=0)
    assert torch.equal(kl.run_kernel(GAUSSIAN, a, a, bandwidth=0.1).diagonal(), torch.ones(400))


def test_near_pairs_of_a_symmetric_matrix_are_exact_in_every_block_of_rows():
    """Later blocks begin at the diagonal, not at the first column."""
    a = points(900, 5)  # three blocks
    a[600:] = a[450:750] + 1e-5 * points(300, 5, seed=1)
    found = kl.run_kernel(kl.squared_distance(symmetric=True), a)
    wanted = (a.double()[None] - a.double()[:, None]).square().sum(-1)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16), ids=str)
@pytest.mark.parametrize("symmetric", (False, True))
def test_out_and_accumulate_of_every_layout(dtype, symmetric):
    a, b = points(300, 40, dtype=dtype), points(280, 40, seed=1, dtype=dtype)
    given = (a,) if symmetric else (a, b)
    descriptor = kl.gaussian(symmetric=symmetric)
    options = {"bandwidth": 6.0, "regularization": 0.5, "row_offset": 3, "col_offset": 3}
    wanted = exact_gaussian(a, given[-1], 6.0)
    wanted.diagonal().add_(0.5)
    size, tolerance = wanted.shape, 2e-3 if dtype == torch.float16 else 2e-6
    fresh = kl.run_kernel(descriptor, *given, **options)
    torch.testing.assert_close(fresh.double(), wanted, rtol=0, atol=tolerance)
    assert not symmetric or torch.equal(fresh, fresh.T)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for kind in (dtype, wide):
        memory = torch.zeros(2 * size[0], 2 * size[1], dtype=kind)
        whole = torch.zeros(*size, dtype=kind)
        for out in (whole, whole.clone().T.contiguous().T, memory[::2, ::2], memory[: size[0], 5:]):
            out = out[:, : size[1]]
            assert kl.run_kernel(descriptor, *given, out=out, **options) is out
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance)
            kl.run_kernel(descriptor, *given, out=out, accumulate=True, **options)
            torch.testing.assert_close(out.double(), 2 * wanted, rtol=0, atol=2 * tolerance)
            memory.zero_()
            assert not symmetric or torch.equal(out, out.T)


def test_batches_strides_and_numbers_of_each_entry():
    a, b = points(3, 40, 200).mT, points(1, 150, 80, seed=1)[..., ::2]
    widths = torch.tensor([2.0, 5.0, 9.0], dtype=torch.float64)
    found = kl.run_kernel(GAUSSIAN, a, b, bandwidth=widths, epsilon=1e-3)
    wanted = exact_gaussian(a, b.expand(3, -1, -1), widths[:, None, None])
    assert found.shape == (3, 200, 150)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)


def test_a_nan_and_an_infinity_reach_their_points_alone():
    a, b = points(200, 50), points(210, 50, seed=1)
    clean = {p: kl.cdist(a, b, p=p) for p in (0, 1, 2, math.inf)}
    a[3, 7], b[5, 9], b[6, 7] = math.nan, math.inf, math.nan
    for p, known in clean.items():
        found = kl.cdist(a, b, p=p)
        assert found[3].isnan().all() and found[:, 6].isnan().all(), p
        others = torch.ones_like(found, dtype=torch.bool)
        others[3], others[:, 5:7] = False, False
        torch.testing.assert_close(found[others], known[others], rtol=2e-6, atol=0)
        assert p == 0 or found[others.any(1), 5].isposinf().all()


def test_bandwidths_at_the_ends_of_range():
    a, b = points(100, 40), points(90, 40, seed=1)
    for bandwidth, value in ((1e-30, 0.0), (1e30, 1.0), (1e-18, 0.0)):
        found = kl.run_kernel(GAUSSIAN, a, b, bandwidth=bandwidth)
        assert torch.equal(found, torch.full((100, 90), value))


def test_a_second_call_of_one_signature_looks_at_its_numbers():
    a, b = points(20, 5), points(21, 5, seed=1)
    kl.run_kernel(GAUSSIAN, a, b, bandwidth=1.0)
    with pytest.raises(ValueError, match="bandwidth must be greater than 0, got -1"):
        kl.run_kernel(GAUSSIAN, a, b, bandwidth=-1.0)
    out = torch.empty(20, 21)
    kl.run_kernel(kl.l1_distance(), a, b, out=out)
    with pytest.raises(ValueError, match="out shares memory with a"):
        memory = torch.zeros(600)
        kl.run_kernel(
            kl.l1_distance(), memory[:100].view(20, 5), b, out=memory[80:500].view(20, 21)
        )


def test_forward_mode_passes_through_calls_that_are_known():
    a, b, tangent = points(30, 40), points(31, 40, seed=1), points(30, 40, seed=2)
    kl.run_kernel(GAUSSIAN, a, b, bandwidth=6.0)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, tangent)
        found = forward_ad.unpack_dual(kl.run_kernel(GAUSSIAN, dual, b, bandwidth=6.0))
    values = exact_gaussian(a, b, 6.0)
    slopes = (b.double()[None] - a.double()[:, None]) * values[..., None] / 36
    wanted = (slopes * tangent.double()[:, None]).sum(-1)
    torch.testing.assert_close(found.tangent.double(), wanted, rtol=1e-4, atol=1e-6)


ROUNDED_ON_CPU = {"default": False, "medium": True, "products": False, "all of cuda": False,
                  "all": True, "on a CPU": True}  # fmt: skip


@pytest.mark.few(100)
@pytest.mark.parametrize("case", [case for case in ROUNDED_ON_CPU if case in torch_settings.CASES])
def test_distances_take_products_where_torch_s_are_of_float32(case, monkeypatch):
    """bfloat16 products of oneDNN would be far off. What GPUs may do changes nothing."""
    a, b = points(200, 60), points(210, 60, seed=1)
    wanted = (b.double()[None] - a.double()[:, None]).square().sum(-1)
    products, compute = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args, **kw: products.append(compute(*args, **kw)))
    with torch_settings.torch_permits(case):
        found = kl.run_kernel(kl.squared_distance(), a, b)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=0)
    assert bool(products) != ROUNDED_ON_CPU[case]
