"""Lowering of few pairs: which calls, which grid, which bytes of parameters, what NVRTC makes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.pairwise.kernels import few
from kernlib.families.pairwise.lowering import choose
from kernlib.families.pairwise.lowering import problem as direct
from kernlib.families.pairwise.lowering.problem import Call, Layout, Problem, Scope
from kernlib.jit import targets
from kernlib.lowering import dtypes
from kernlib.lowering.kernel import Gpu
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only, stem
from tests.support.speeds import slow_but

L1, L2, NORM = kl.l1_distance(), kl.l2_distance(), kl.p_distance()
SYMMETRIC = kl.laplace_l1(symmetric=True)
FEW = few.Few()


def problem(m, n, k, batch=1, **changes):
    """A call on contiguous row-major tensors, with some fields changed."""
    fields = {
        "a": Layout(m * k, k, 1),
        "b": Layout(n * k, k, 1),
        "out": Layout(m * n, n, 1),
    }
    return Problem(m, n, k, batch, **(fields | changes))


def lowered(call, descriptor=L1, choice=None, processors=132):
    strides = (0,) * direct.scalar_count(descriptor)
    return choose.lower(descriptor, call, "sm_90a", processors, strides, "fp32", choice)


def few_pairs(descriptor, call):
    strides = (0,) * direct.scalar_count(descriptor)
    return FEW.launch(descriptor, Call(descriptor, call, strides), Gpu("sm_90a", 132), {})


def variants(descriptor, kinds):
    return FEW.specs(descriptor, Scope(kinds, "sm_90a"), "sm_90a")


def kind(*arguments, **options) -> str:
    found = lowered(*arguments, **options)
    return "split" if len(found.steps) > 1 else stem(only(found).spec).removeprefix("pairwise_")


RULE = [  # m, n, k, batch, changes, kind on an H100
    (24, 111, 765, 1, {}, "few"),
    (13, 149, 384, 1, {}, "few"),
    (201, 12, 117, 1, {}, "few"),
    (15, 19, 7, 1, {}, "few"),
    (1, 1, 0, 1, {}, "few"),
    (20, 436, 10**6, 1, {}, "few"),
    (240, 360, 765, 1, {}, "few"),  # 24 tiles
    (360, 360, 765, 1, {}, "direct"),  # 36, whose pairs take 61 us and a tile 51
    (152, 562, 186, 1, {}, "direct"),  # patches of 8 warps each
    (148, 387, 3, 1, {}, "few"),  # of one
    (1235, 32, 132, 1, {}, "direct"),
    (918, 15, 134, 1, {}, "few"),
    (1152, 16, 640, 1, {}, "few"),
    (366, 504, 9, 1, {}, "direct"),
    (2000, 2000, 765, 1, {}, "direct"),
    (24, 111, 765, 10, {}, "few"),
    (24, 111, 765, 40, {}, "few"),
    (24, 111, 765, 100, {}, "direct"),
    (200, 200, 765, 1, {}, "few"),
    (200, 200, 765, 1, {"b": Layout(0, 1, 200)}, "direct"),  # whose features lie apart
    (24, 111, 765, 1, {"b": Layout(0, 1, 111)}, "few"),
    (300, 300, 765, 1, {"dtype": "float16"}, "few"),
    (300, 300, 765, 1, {"dtype": "float64"}, "direct"),
]


@pytest.mark.parametrize(("m", "n", "k", "batch", "changes", "expected"), RULE)
def test_few_pairs_are_those_that_leave_most_of_a_gpu_idle_in_tiles(
    m, n, k, batch, changes, expected
):
    assert kind(problem(m, n, k, batch, **changes)) == expected


PRODUCTS = [  # m, n, k, kind of products
    (20, 436, 689, "few"),
    (1152, 16, 640, "few"),
    (360, 360, 4096, "split"),  # faster by four times
    (147, 10837, 660, "split"),
    (366, 504, 9, "direct"),
]


@pytest.mark.parametrize(("m", "n", "k", "expected"), PRODUCTS)
def test_products_of_tensor_cores_are_weighed_too(m, n, k, expected):
    assert kind(problem(m, n, k), L2) == expected


def test_a_gpu_of_few_multiprocessors_is_filled_by_less():
    call = problem(64, 256, 300)
    assert kind(call) == "few" and kind(call, processors=6) == "direct"


@pytest.mark.parametrize(("m", "n", "k"), [(24, 111, 765), (500, 500, 10), (2000, 2000, 50)])
def test_tuning_may_choose_it_where_it_is_taken(m, n, k):
    call = problem(m, n, k)
    known = choose.candidates(L1, call, "sm_90a", "fp32")
    assert ({"kind": "few"} in known) == FEW.takes(Call(L1, call), "sm_90a") == (m < 2000)
    for choice in known:
        expected = choice.get("kind", "direct")
        text = {name: str(value) for name, value in choice.items()}
        assert kind(call, choice=choice) == kind(call, choice=text) == expected


@pytest.mark.parametrize(
    ("changes", "taken"),
    [({}, True), ({"batch": 16_385}, False), ({"k": 2**30}, True), ({"k": 2**30 + 1}, False)],
)
def test_what_it_takes(changes, taken):
    call = Problem(**{"m": 3, "n": 4, "k": 5, "batch": 16_384, **dict.fromkeys(
        ("a", "b", "out"), Layout(0, 0, 1)), **changes})  # fmt: skip
    assert FEW.takes(Call(L1, call), "sm_90a") is taken and call.batch - 1 < direct.MAX_BATCH_BLOCKS


@pytest.mark.parametrize("choice", [{"kind": "few"}, {"kind": "few", "x": 1}, {"kind": "many"}, {}])
def test_a_choice_that_is_no_candidate_is_passed_over(choice):
    call = problem(3000, 3000, 10)
    assert lowered(call, choice=choice) == lowered(call)


@pytest.mark.parametrize(
    ("features", "warps"),
    [(0, 1), (1, 1), (32, 1), (33, 2), (64, 2), (65, 4), (128, 4), (129, 8), (10**6, 8)],
)
def test_warps_share_a_patch_by_32_features_each(features, warps):
    assert 1 << few.slice_bits(features) == warps
    step = only(few_pairs(L1, problem(10, 9, features, 70)))
    assert step.grid == (-(-9 * warps // 8), 70)  # of 3 x 3 patches


# variants() and specs() know what lower() chooses.

DESCRIPTORS = [L1, L2, SYMMETRIC, NORM, kl.power_sum(), kl.polynomial(2), kl.dot_product()]
STRIDES = st.sampled_from([0, 1, 2, 64, 65, 1000])
LAYOUTS = st.builds(Layout, STRIDES, STRIDES, STRIDES, st.sampled_from([0, 4, 8]))
KNOWN = {}


@settings(max_examples=100)
@given(
    st.sampled_from(DESCRIPTORS), st.data(), st.integers(1, 500), st.integers(1, 500),
    st.integers(0, 900), st.integers(1, 9), st.sampled_from(list(dtypes.DTYPES)),
)  # fmt: skip
def test_lowering_chooses_among_the_variants(descriptor, data, m, n, k, batch, dtype):
    a, b, out = (data.draw(LAYOUTS) for _ in range(3))
    call = Problem(
        m, n, k, batch, a, a if descriptor.symmetric else b, out, dtype,
        data.draw(st.sampled_from([dtype, dtypes.DTYPES[dtype].accumulator])),
        inner=data.draw(st.sampled_from(list(direct.inner_codes(descriptor)))),
        root=isinstance(descriptor.outer, kl.Root),
    )  # fmt: skip
    if descriptor not in KNOWN:
        KNOWN[descriptor] = set(variants(descriptor, tuple(dtypes.DTYPES)))
    step = only(few_pairs(descriptor, call))
    assert step.spec in KNOWN[descriptor]


def test_variants_of_a_descriptor_have_those_of_few_pairs():
    made = choose.variants(L1, "sm_80", ("float32",))
    assert set(variants(L1, ("float32",))) <= set(made) and len(set(made)) == len(made)


# What NVRTC makes of it.


def matrix():
    """Name to spec: cheap and costly terms and epilogues of every kind of type."""
    cases = [
        (L1, "any", False),
        (L2, "any", False),
        (kl.gaussian(), "any", False),
        (kl.matern52(), "any", False),
        (kl.dot_product(), "any", False),
        (SYMMETRIC, "any", False),
        (kl.power_sum(), "any", False),
        *[(NORM, p, True) for p in ("any", "device", 0.0, 0.5, 2.5, 3.0, 6.0, math.inf)],
        (kl.exp_power_sum(), "any", False),
    ]
    specs = [
        FEW.spec(descriptor, FEW.Variant(dtype, out, inner, "any", root), "sm_90a")
        for descriptor, inner, root in cases
        for dtype, out in (("float32", "float32"), ("float64", "float64"), ("float16", "float32"))
    ]
    return {spec.description: spec for spec in specs}


MATRIX = matrix()
CALLS = ("power_sum few pairs float64", "p_distance few pairs float64")  # of pow and exp
CALLS_SPILL = 256  # bytes, around them


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(["l1_distance few pairs float32"], MATRIX))
def test_a_kernel_compiles_within_its_bounds(name, arch):
    wanted = MATRIX[name]
    made = compiled(wanted, arch)
    assert made.spilled <= (CALLS_SPILL if any(c in name for c in CALLS) else 0)
    assert targets.resident_blocks(arch, wanted.threads, made.registers, made.shared) >= 2
