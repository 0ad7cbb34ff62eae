"""Pair gradients on the GPU: values of every way, layouts, batches, exactness and runtime."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.gradients import primitive
from kernlib.families.pairwise.gradients.points import pair_gradient
from tests.gpu.families.pairwise.gradient_cases import by, check, expected, operands
from tests.gpu.watched import capture, nothing_waits

PS = (0, 0.3, 0.5, 0.7, 1, 1.1, 1.3, 1.5, 2, 2.5, 3, 4, 6)
every_kernel = pytest.mark.parametrize("way", ("direct", "mma", "wgmma"))
SIZES = ((1, 1, 1), (7, 9, 5), (301, 67, 45), (304, 64, 128), (1000, 130, 200))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("sets", (1, 2, 5, 16, 33))
@every_kernel
def test_values_of_all_kernels(size, sets, way, seed):
    for p in (1, 1.5) if sets > 1 or way == "direct" else (1,):
        with by(way):
            check(operands(*size, sets), p)


@pytest.mark.parametrize("p", PS)
@every_kernel
def test_every_exponent(p, way, seed):
    with by(way):
        check(operands(301, 67, 45, 3), p)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("sets", (1, 2, 5))
def test_every_exponent_in_float64(p, sets, seed):
    check(operands(301, 67, 45, sets, torch.float64), p)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("way", ("direct", "mma", "wgmma", "products"))
def test_half_types(dtype, way, seed):
    for sets, p in ((1, 1), (3, 1), (3, 1.5)) if way != "products" else ((1, 2), (3, 2)):
        with by(way):
            check(operands(301, 67, 45, sets, dtype), p)


@pytest.mark.parametrize("sets", (1, 5))
@pytest.mark.parametrize("shift", (0.0, 100.0))
def test_products_of_squared_differences(sets, shift, seed):
    a, b, c, d = operands(1000, 130, 200, sets)
    with by("products"):
        check([a, b + shift, c, d + shift], 2)


LAYOUTS = {
    "turned": lambda t: t.mT.contiguous().mT,
    "padded": lambda t: torch.nn.functional.pad(t, (0, 5))[..., :-5],
    "shifted": lambda t: torch.nn.functional.pad(t, (3, 2))[..., 3:-2],
    "stepped": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_kernel
@pytest.mark.parametrize("sets", (1, 5))
def test_every_layout_gives_the_same(layout, way, sets, seed):
    given = operands(304, 64, 128, sets)
    with by(way):
        wanted = check(given, 1)
        for place in range(4):
            changed = list(given)
            changed[place] = LAYOUTS[layout](given[place])
            assert torch.equal(kl.cdist_grad(*changed, p=1), wanted), place


@every_kernel
@pytest.mark.parametrize("order", ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)))
def test_out_of_any_strides_is_filled_and_nothing_else(way, order, seed):
    given = operands(100, 68, 44, 5)
    shape = [(5, 44, 68)[i] for i in order]
    big = torch.full([s + 4 for s in shape], float("nan"), device="cuda")
    part = big[tuple(slice(0, s) for s in shape)]
    out = part.permute([order.index(i) for i in range(3)])
    with by(way):
        check(given, 1, out=out)
    assert big.isnan().sum() == big.numel() - part.numel()


@every_kernel
@pytest.mark.parametrize("sets", (0, 1, 3))
def test_accumulate_adds_and_parts_add_up(way, sets, seed):
    x, z = torch.randn(70, 40, device="cuda"), torch.randn(20000, 40, device="cuda")
    w, c = torch.randn(70, 20000, device="cuda"), torch.randn(max(sets, 1), 20000, device="cuda")
    c = c if sets else None
    host = [None if t is None else t.cpu().double() for t in (x, z, w, c)]
    wanted = pair_gradient("difference", kl.Abs(), *host)
    with by(way):
        out = torch.ones(wanted.shape, device="cuda")
        pair_gradient("difference", kl.Abs(), x, z, w, c, out=out, accumulate=True)
    error = (out.cpu() - 1 - wanted).norm() / wanted.norm()
    assert error < 1e-5


@every_kernel
def test_batches_broadcast_and_numbers_stay_on_the_device(way, seed):
    p = torch.tensor([1.0, 0.0, 1.5, 0.0, 0.7], device="cuda")[::2]
    given = operands(150, 40, 30, 3, batch=(3,))
    given[1] = given[1][:1].expand(3, -1, -1)
    given[2] = given[2][:1]
    with by(way):
        torch.cuda.synchronize()
        found = kl.cdist_grad(*given, p=p)
        with nothing_waits():
            again = kl.cdist_grad(*given, p=p)
        assert torch.equal(again, found)
        for l, exponent in enumerate(p.tolist()):
            own = [t[l if t.shape[0] > 1 else 0] for t in given]
            wanted, terms = expected(own, exponent)
            assert ((found[l].cpu() - wanted).abs() / terms.clamp(min=1e-30)).max() < 3e-6


@every_kernel
@pytest.mark.parametrize("sets", (1, 3))
@pytest.mark.parametrize("p", (0.7, 1, 1.5, 2))
def test_equal_coordinates_add_exactly_nothing(way, sets, p, seed):
    if way != "direct" and sets == 1 and p != 1:
        pytest.skip("not a kernel of tensor cores")
    b = torch.randint(0, 2, (40, 301), device="cuda").float()
    d = b[:, :1].expand(-1, 65).clone()
    a = torch.randn(301, 65, device="cuda")
    a[(b != b[:, :1]).any(0)] = 0
    a[0] = 1e30
    with by(way):
        found = kl.cdist_grad(a, b, torch.randn(sets, 301, device="cuda"), d, p=p)
    assert (found == 0).all()


@every_kernel
@pytest.mark.parametrize("sets", (1, 3))
@pytest.mark.parametrize("p", (1, 1.5))
def test_a_nan_reaches_what_it_is_part_of(way, sets, p, seed):
    if way != "direct" and sets == 1 and p != 1:
        pytest.skip("not a kernel of tensor cores")
    lost = (
        lambda out: out[:, :, 2],
        lambda out: out[:, 1],
        lambda out: out[1 % sets],
        lambda out: out[:, 1, 2],
    )
    for place, part in enumerate(lost):
        given = operands(301, 67, 45, sets)
        given[place][1 % given[place].shape[0], 2] = float("nan")
        with by(way):
            found = kl.cdist_grad(*given, p=p)
        assert part(found).isnan().all(), place
        assert found.isnan().sum() == part(found).numel(), place


@every_kernel
def test_equal_infinities_have_no_sign(way, seed):
    a, b, c, d = operands(301, 67, 45, 1)
    b[3, 7], d[3, 5], d[3, 6] = float("inf"), float("inf"), -float("inf")
    with by(way):
        found = kl.cdist_grad(a, b, c, d, p=1)
    assert found[0, 3, 5].isnan() and found.isnan().sum() == 1


def test_points_behind_the_last_add_nothing_to_infinities(seed):
    a, b, c, d = operands(301, 67, 45, 1)
    d[3, 5] = float("inf")
    a, c = a.abs(), c.abs()
    with by("direct"):
        for p in (1.5, 3, 1.3):
            assert kl.cdist_grad(a, b, c, d, p=p)[0, 3, 5] == float("inf")


@every_kernel
@pytest.mark.parametrize("size", ((1, 9, 45), (301, 67, 45), (304, 64, 300)), ids=str)
def test_points_behind_the_last_are_no_zeros_far_away(size, way, seed):
    given = operands(*size, 5)
    for place in (1, 3):  # fifth powers leave float32, those of differences do not
        given[place] = 1e8 + (4 * given[place]).round() * 8
    for p in (6, torch.tensor(6.0, device="cuda")):
        with by(way):
            check(given, p, tolerance=2e-5)


@pytest.mark.parametrize("operator", ("difference", "dot"))
@pytest.mark.parametrize("first", (True, False))
def test_every_stage(operator, first, seed):
    x, z = torch.randn(67, 45, device="cuda"), torch.randn(301, 45, device="cuda")
    w, c = torch.randn(67, 301, device="cuda"), torch.randn(3, 301, device="cuda")
    cases = (
        (kl.Identity(), {}), (kl.Abs(), {}), (kl.Square(), {}), (kl.Power(), {"p": 1.7}),
        (kl.Power(), {"p": 0}), (kl.Power(), {"p": torch.tensor(2.3, device="cuda")}),
        (kl.ExpPower(), {"p": 1, "inner_scale": -0.5}),
        (kl.ExpPower(), {"p": 2, "inner_scale": torch.tensor(-0.5, device="cuda")}),
        (kl.ExpPower(), {"p": 1.3, "inner_scale": -0.5}),
    )  # fmt: skip
    for inner, values in cases:
        for own in (None, c):
            found = pair_gradient(operator, inner, x, z, w, own, first=first, **values)
            host = [None if t is None else t.cpu().double() for t in (x, z, w, own)]
            numbers = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            wanted = pair_gradient(operator, inner, *host, first=first, **numbers)
            scale = max(wanted.norm().item(), 1e-30)
            assert (found.cpu() - wanted).norm().item() <= 1e-5 * scale, (inner, values)


def test_a_square_root_of_differences(seed):
    x, z = torch.rand(67, 45, device="cuda"), torch.rand(301, 45, device="cuda") + 1
    w = torch.randn(67, 301, device="cuda")
    for first, (left, right) in ((True, (x, z)), (False, (x + 2, z))):
        found = pair_gradient("difference", kl.Sqrt(), left, right, w, first=first)
        host = [t.cpu().double() for t in (left, right, w)]
        wanted = pair_gradient("difference", kl.Sqrt(), *host, first=first)
        assert (found.cpu() - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_captured_call_replays_with_another_exponent(seed):
    given = operands(150, 40, 30, 3)
    p = torch.tensor(1.5, device="cuda")
    out = torch.empty(3, 30, 40, device="cuda")
    kl.cdist_grad(*given, out=out, p=p)
    with capture() as graph:
        kl.cdist_grad(*given, out=out, p=p)
    for value in (1.5, 2.0, 0.7):
        p.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        wanted, terms = expected(given, value)
        assert ((out.cpu() - wanted).abs() / terms.clamp(min=1e-30)).max() < 3e-6


def test_the_rule_sends_large_calls_to_tensor_cores(seed):
    seen = []
    rule = primitive.rule
    given = operands(4000, 600, 250, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            primitive, "rule", lambda problem: seen.append(rule(problem)) or rule(problem)
        )
        kl.cdist_grad(*given, p=1.25)
    assert "tensor" in seen
