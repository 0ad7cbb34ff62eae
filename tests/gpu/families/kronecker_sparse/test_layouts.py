"""Where operands and results lie: strides, alignment, further dimensions, guards, sizes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import kernlib as kl
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse.kernels.lanes import via_batch_last as transposed
from tests.gpu.families.kronecker_sparse import cases as ks

GUARD = 512  # elements before and behind a tensor: whole 16 bytes
two_numbers = pytest.mark.parametrize("numbers", ("fp32", "fp16"))
PATTERNS = (*ks.FEW, (2, 72, 100, 2))
some_patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def built():
    """The kernels of most tests here, compiled side by side."""
    problems = []
    for pattern in PATTERNS:
        for numbers in ks.NUMBERS:
            for last in ks.LAYOUTS:
                x, weight = ks.operands(pattern, 136, numbers, last)
                descriptor = ks.product(pattern, numbers, last)
                out = ks.random(*ks.shape_of(descriptor.out_features, (136,), last), dtype=x.dtype)
                cases = [(x, weight, each) for each in ks.views(out).values()]
                cases += [(each, weight, None) for each in ks.views(x).values()]
                cases += [(x, each, None) for each in weights(weight).values()]
                problems += [ks.problem_of(descriptor, *case) for case in cases]
    ks.build([spec for each in dict.fromkeys(problems) for spec in ks.specs_of((), each)])


def weights(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of a weight (a, b, c, d) in other memory."""
    a, b, c, d = weight.shape
    whole = torch.full((a + 1, b + 1, c + 3, d + 5), math.nan, dtype=weight.dtype,
                       device=weight.device)  # fmt: skip
    flat = torch.full((weight.numel() + 1,), math.nan, dtype=weight.dtype, device=weight.device)
    wide = torch.full((a, b, c, 2 * d), math.nan, dtype=weight.dtype, device=weight.device)
    return {
        "itself": weight,
        "transposed": weight.transpose(1, 2).contiguous().transpose(1, 2),
        "blocks first": weight.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        "backwards": weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "slice": whole[1:, 1:, 2:-1, 3:-2].copy_(weight),
        "one element further": flat[1:].view(weight.shape).copy_(weight),
        "every other lane": wide[..., ::2].copy_(weight),
    }


# Operands.


@ks.both_layouts
@two_numbers
@some_patterns
def test_every_layout_of_x(pattern, numbers, batch_last, seed):
    x, weight = ks.operands(pattern, 136, numbers, batch_last)
    for view in ks.views(x).values():
        ks.check(ks.product(pattern, numbers, batch_last), view, weight, numbers)


@ks.both_layouts
@two_numbers
@some_patterns
def test_every_layout_of_a_weight(pattern, numbers, batch_last, seed):
    x, weight = ks.operands(pattern, 136, numbers, batch_last)
    for view in weights(weight).values():
        ks.check(ks.product(pattern, numbers, batch_last), x, view, numbers)


@ks.both_layouts
@ks.few_patterns
def test_expanded_operands(pattern, batch_last, seed):
    x, weight = ks.operands(pattern, 136, "fp32", batch_last)
    descriptor = ks.product(pattern, "fp32", batch_last)
    for view in (x[:1].expand_as(x), x[:, :1].expand_as(x), x[:1, :1].expand_as(x)):
        ks.check(descriptor, view, weight, "fp32")
    for axis in range(4):
        ks.check(descriptor, x, weight.narrow(axis, 0, 1).expand_as(weight), "fp32")


@ks.both_layouts
@two_numbers
@ks.few_patterns
def test_a_bias_of_any_stride(pattern, numbers, batch_last, seed):
    descriptor = ks.product(pattern, numbers, batch_last, kl.Bias())
    x, weight = ks.operands(pattern, 136, numbers, batch_last)
    features = descriptor.out_features
    for bias in (
        ks.random(3 * features, dtype=x.dtype)[::3],
        ks.random(features + 1, dtype=x.dtype)[1:],
        ks.random(1, dtype=x.dtype).expand(features),
    ):
        wanted = ks.exact(x, weight, batch_last) + ks.lay(bias, batch_last)
        ks.check(descriptor, x, weight, numbers, wanted=wanted, bias=bias)


BATCHES = ((), (1,), (2, 3), (2, 1, 24), (1, 1), (4, 5, 8))


@ks.both_layouts
@two_numbers
@ks.few_patterns
def test_further_dimensions(pattern, numbers, batch_last, seed):
    descriptor = ks.product(pattern, numbers, batch_last)
    for batch in BATCHES:
        x, weight = ks.operands(pattern, batch, numbers, batch_last)
        ks.check(descriptor, x, weight, numbers)
        if len(batch) < 2:
            continue
        backwards = x.permute(*reversed(range(x.dim()))).contiguous()
        padded = x.new_full([size + 8 for size in x.shape], math.nan)
        for view in (
            backwards.permute(*reversed(range(x.dim()))),
            padded[tuple(slice(size) for size in x.shape)].copy_(x),
        ):
            ks.check(descriptor, view, weight, numbers)


@ks.both_layouts
@ks.few_patterns
def test_negated_views_keep_their_sign(pattern, batch_last, seed):
    x, weight = ks.operands(pattern, 136, "fp32", batch_last)
    bias = ks.random(ks.product(pattern).out_features)
    given = [torch.complex(t, t).conj().imag for t in (x, weight, bias)]
    assert all(t.is_neg() for t in given)
    descriptor = ks.product(pattern, "fp32", batch_last, kl.Bias())
    found = kl.run_kernel(descriptor, *given[:2], bias=given[2])
    wanted = ks.exact(x, weight, batch_last) - ks.lay(bias, batch_last)
    assert ks.relative_error(found, wanted) <= 1e-6
    target = torch.zeros_like(found, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="out is a negated view"):
        kl.run_kernel(descriptor, x, weight, bias=bias, out=target)


@ks.both_layouts
@two_numbers
@ks.few_patterns
def test_gradients_of_a_weight_of_every_layout(pattern, numbers, batch_last, seed):
    a, b, _, d = pattern
    x, _ = ks.operands(pattern, 520, numbers, batch_last)
    grad = ks.random(*ks.shape_of(a * b * d, (520,), batch_last), dtype=x.dtype)
    wanted = primitives.weight_gradient(grad.double(), x.double(), pattern, batch_last)
    lefts, rights = ks.views(grad), ks.views(x)
    pairs = [(lefts[name], x) for name in lefts] + [(grad, rights[name]) for name in rights]
    for left, right in (*pairs, *zip(lefts.values(), rights.values(), strict=True)):
        found = primitives.weight_gradient(left, right, pattern, batch_last, "fp32")
        case = (left.stride(), left.data_ptr() % 16, right.stride(), right.data_ptr() % 16)
        assert ks.relative_error(found, wanted) <= ks.TOLERANCE[numbers], case


# Results.


@ks.both_layouts
@two_numbers
@some_patterns
def test_every_layout_of_out_is_filled_and_nothing_else(pattern, numbers, batch_last, seed):
    descriptor = ks.product(pattern, numbers, batch_last)
    x, weight = ks.operands(pattern, 136, numbers, batch_last)
    wanted = ks.exact(x, weight, batch_last)
    for layout, view in ks.views(wanted.to(x.dtype)).items():
        whole = view._base

        def call(view=view, whole=whole) -> torch.Tensor:
            whole.fill_(math.nan)
            return kl.run_kernel(descriptor, x, weight, out=view)

        for name, found in ks.each(call):
            assert found is view
            assert ks.relative_error(view, wanted) <= ks.TOLERANCE[numbers], (layout, name)
            assert whole.isnan().sum() == whole.numel() - view.numel(), (layout, name)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, shift: int) -> tuple[torch.Tensor, ...]:
    """A tensor in the midst of memory that holds NaN, and that memory before and behind it."""
    size = math.prod(shape)
    memory = torch.full((size + 2 * GUARD + shift,), math.nan, dtype=dtype, device=ks.DEVICE)
    before, inside, behind = memory.split((GUARD + shift, size, GUARD))
    return inside.view(shape), before, behind


@ks.both_layouts
@ks.all_numbers
@pytest.mark.parametrize("pattern", (*PATTERNS, (1, 1, 1, 1), (3, 7, 8, 2)), ids=str)
def test_guards_around_operands_and_results(pattern, numbers, batch_last, seed):
    """Nothing is read from what surrounds x and weight, nor written around the result."""
    descriptor = ks.product(pattern, numbers, batch_last)
    for batch in (1, 2, 3, 5, 8, 127, 128, 129, 200):
        for shift in (0, 1):
            x, weight = (
                guarded(t.shape, t.dtype, shift)[0].copy_(t)
                for t in ks.operands(pattern, batch, numbers, batch_last)
            )
            wanted = ks.exact(x, weight, batch_last)
            out, *guards = guarded(wanted.shape, x.dtype, shift)

            def call(x=x, weight=weight, out=out) -> torch.Tensor:
                out.fill_(math.nan)
                return kl.run_kernel(descriptor, x, weight, out=out)

            for name, found in ks.each(call):
                case = f"batch {batch} shift {shift} {name}"
                assert ks.relative_error(found, wanted) <= ks.TOLERANCE[numbers], case
                assert all(guard.isnan().all() for guard in guards), case


@ks.both_layouts
@two_numbers
@ks.few_patterns
def test_an_out_of_further_dimensions(pattern, numbers, batch_last, seed):
    """Also where its batch is not one of strides, and a copy fills it."""
    descriptor = ks.product(pattern, numbers, batch_last)
    x, weight = ks.operands(pattern, (4, 5, 8), numbers, batch_last)
    wanted = ks.exact(x, weight, batch_last)
    for turned in (False, True):
        sizes = wanted.shape[::-1] if turned else wanted.shape
        whole = torch.full([n + 8 for n in sizes], math.nan, dtype=x.dtype, device=ks.DEVICE)
        view = whole[tuple(slice(3, n + 3) for n in sizes)]
        view = view.permute(*reversed(range(view.dim()))) if turned else view
        version = view._version
        assert kl.run_kernel(descriptor, x, weight, out=view) is view
        assert view._version > version
        assert ks.relative_error(view, wanted) <= ks.TOLERANCE[numbers]
        assert whole.isnan().sum() == whole.numel() - view.numel()


SLICED = (ks.LANES, (2, 24, 40, 8), (1, 5, 3, 24))


@ks.all_numbers
@pytest.mark.parametrize("pattern", SLICED, ids=str)
def test_slices_of_a_batch_by_way_of_batch_last(pattern, numbers, seed, monkeypatch):
    """Of 256 rows and what is left, from rows that lie apart to rows that lie apart."""
    descriptor = ks.product(pattern, numbers, False, (kl.Bias(), kl.Gelu()))
    features = descriptor.in_features + descriptor.out_features
    monkeypatch.setattr(transposed, "WORKSPACE", 256 * features * ks.DTYPES[numbers].itemsize)
    for batch in (511, 512, 513, 1000, 1001):
        x, weight = ks.operands(pattern, batch, numbers)
        x = ks.views(x)["leading dimension"]
        bias = ks.random(descriptor.out_features, dtype=x.dtype)
        wanted = F.gelu(ks.exact(x, weight) + ks.lay(bias, False))
        out = ks.views(wanted.to(x.dtype))["leading dimension"]
        given = (descriptor, x, weight, out)
        problem = ks.problem_of(*given, bias=bias)
        known = [c for c in ks.candidates(problem) if c["kind"] == transposed.Transposed.name]
        if not known:
            pytest.skip("other GPUs lack this kind")
        out._base.fill_(math.nan)
        with ks.choosing(known[0]) as seen:
            kl.run_kernel(*given[:3], out=out, bias=bias)
        assert [name.split()[1] for name in seen.launched] == [
            "pack", *["turn", "hopper", "turn"] * math.ceil(batch / 256)
        ]  # fmt: skip
        tolerance = 2e-6 if numbers == "fp32" else ks.TOLERANCE[numbers]  # of two functions
        assert ks.relative_error(out, wanted) <= tolerance, batch
        assert out._base.isnan().sum() == out._base.numel() - out.numel(), batch


def test_what_a_kernel_reads_a_copy_of_is_not_written(seed):
    pattern = (2, 16, 16, 2)
    descriptor = ks.product(pattern, epilogue=(kl.Bias(), kl.Scale()))
    _, weight = ks.operands(pattern, 1)
    memory = ks.random(64, 64)
    out, before = memory[:6].view(3, 2, 64), memory.clone()
    taken = {
        "x": memory[:12].view(3, 4, 64)[:, :2],
        "bias": memory.flatten()[:128:2],
        "scale": memory.view(torch.float64)[0, 0],
    }
    for name, tensor in taken.items():
        given = {"x": ks.random(3, 2, 64), "bias": ks.random(64), "scale": 2.0, name: tensor}
        x = given.pop("x")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"out shares memory with {name};"):
                kl.run_kernel(descriptor, x, weight, out=out, **given)
            kl.run_kernel(descriptor, x, weight, out=torch.empty_like(out), **given)
    first, last = ks.product((1, 64, 64, 1)), ks.product((1, 64, 64, 1))
    chain = kl.KroneckerSparseChain((first, last))
    weights = ks.random(2, 1, 64, 64, 1)
    for name, out in (("x", memory), (r"weights\[0\]", weights[0].view(64, 64))):
        with pytest.raises(ValueError, match=f"out shares memory with {name};"):
            kl.run_kernel(chain, memory, *weights, out=out)
    assert torch.equal(memory, before)


# Sizes.


def memory() -> int:
    return torch.cuda.get_device_properties(0).total_memory if ks.DEVICE == "cuda" else 0


MANY = 2**20 + 4104  # vectors of 2048 features: more than 2**31 elements, in rows of whole 16 bytes
ENDS = (0, 1, 2**20 - 1, 2**20, 2**20 + 1, MANY - 1)  # around 2**31 elements, and the last


@pytest.mark.skipif(memory() < 40e9, reason="takes 20 GB")
@ks.both_layouts
@pytest.mark.parametrize("pattern", ((1, 512, 8, 4), (4, 512, 8, 1)), ids=str)
def test_more_than_2_to_the_31_elements(pattern, batch_last, seed):
    """As a result, as the operand of a product and as one of a weight's gradient."""
    a, b, c, d = pattern
    x, weight = ks.operands(pattern, MANY, "bf16", batch_last)
    y = torch.empty(ks.shape_of(a * b * d, (MANY,), batch_last), dtype=x.dtype, device=ks.DEVICE)
    assert y.numel() > 2**31
    places = torch.tensor([*ENDS, *torch.randint(MANY, (200,)).tolist()], device=ks.DEVICE)
    axis = 1 if batch_last else 0

    def call() -> torch.Tensor:
        y.fill_(math.nan)
        return kl.run_kernel(ks.product(pattern, "bf16", batch_last), x, weight, out=y)

    for name, _ in ks.each(call):
        found, some = y.index_select(axis, places), x.index_select(axis, places)
        error = ks.relative_error(found, ks.exact(some, weight, batch_last))
        assert error <= ks.TOLERANCE["bf16"], name
        assert not any(part.isnan().any() for part in y.split(2**16)), name

    turned, back = ks.product((a, c, b, d), "bf16", batch_last), weight.transpose(1, 2)
    some = y.index_select(axis, places)
    for name, found in ks.each(partial(kl.run_kernel, turned, y, back)):
        found = found.index_select(axis, places)
        error = ks.relative_error(found, ks.exact(some, back, batch_last))
        assert error <= ks.TOLERANCE["bf16"], name

    wanted = torch.zeros(pattern, dtype=torch.float64, device=ks.DEVICE)
    for left, right in zip(y.split(2**16, axis), x.split(2**16, axis), strict=True):
        wanted += primitives.weight_gradient(left.double(), right.double(), pattern, batch_last)
    for name, found in ks.each(partial(primitives.weight_gradient, y, x, pattern, batch_last)):
        assert ks.relative_error(found, wanted) <= ks.TOLERANCE["bf16"], name


GAPS = (
    *[((1, b, 16, 1), False, batch) for b in (1, 2, 3, 5, 9, 33, 65) for batch in (1, 5)],
    *[((1, 3, 16, d), True, batch) for d in (1, 2) for batch in (1, 2, 3, 7, 9, 33)],
    *[((1, b, 8, d), False, 5) for b, d in ((3, 2), (5, 4), (1, 2), (1, 4), (3, 8), (3, 16))],
)


@ks.all_numbers
@pytest.mark.parametrize(("pattern", "batch_last", "batch"), GAPS, ids=str)
def test_gaps_between_lines_of_a_result_stay(pattern, batch_last, batch, numbers, seed):
    """The copy engine writes whole 16 bytes, which the end of a line need not fill."""
    # Positive: terms that cancel made an error of 3.4e-3 in tf32 of a result of one element.
    x, weight = (t.abs_() for t in ks.operands(pattern, batch, numbers, batch_last))
    lined = torch.full((len(x), 128), math.nan, dtype=x.dtype, device=ks.DEVICE)
    x = lined[:, : x.shape[1]].copy_(x)
    wanted = ks.exact(x, weight, batch_last)
    lines, line = wanted.shape
    whole = torch.full((lines + 2, 128), math.nan, dtype=x.dtype, device=ks.DEVICE)
    out = whole[1:-1, :line]
    kl.run_kernel(ks.product(pattern, numbers, batch_last), x, weight, out=out)
    assert ks.relative_error(out, wanted) <= ks.TOLERANCE[numbers]
    assert whole[:, line:].isnan().all() and whole[[0, -1]].isnan().all()
