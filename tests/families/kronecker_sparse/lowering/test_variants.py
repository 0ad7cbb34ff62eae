"""The variants of a Kronecker-sparse factor: all that lowering chooses for it, whichever kind of
kernel, batch, layout and gradient."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout
from kernlib.jit import sources, targets
from tests.families.kronecker_sparse.lowering.cases import (
    DTYPES,
    batch_last,
    by_x,
    factor,
    lowered,
    problem,
    weight_gradient,
)

ARCHS = ("sm_90a", "sm_80", "sm_86")
PATTERNS = [
    (2, 96, 48, 1), (1, 20, 1040, 1), (3, 64, 200, 4), (1, 256, 8, 16), (2, 40, 24, 24),
    (4, 64, 1, 1),
]  # fmt: skip
EPILOGUES = [(), (kl.Bias(), kl.Relu()), (kl.Bias(), kl.Scale(), kl.Gelu())]


@cache
def known(epilogue, pattern, arch, precision):
    return set(lowering.variants(epilogue, pattern, arch, DTYPES, precision))


@st.composite
def problems(draw):
    """A pattern, and a forward problem or a gradient, contiguous or nearly."""
    a, b, c, d = pattern = draw(st.sampled_from(PATTERNS))
    last = draw(st.booleans())
    batch = draw(st.sampled_from([1, 8, 100, 136, 200, 1024, 1032, 5000, 25088, 25089]))
    dtype = draw(st.sampled_from(DTYPES))
    precision = draw(st.sampled_from(["fp32", "tf32"])) if dtype == "float32" else "fp32"
    options = {"dtype": dtype, "precision": precision}
    role = draw(st.sampled_from(["forward", "by x", "by weight"]))
    if role == "by weight":
        made = weight_gradient(a, b, c, d, batch, last, **options)
    else:
        made = (factor if role == "forward" else by_x)(*pattern, last, rows=batch, **options)
    made = made._replace(left=changed(draw, made.left), right=changed(draw, made.right))
    if role == "forward":  # gradients are new tensors
        made = made._replace(out=changed(draw, made.out))
    return pattern, role, made


def changed(draw, layout: Layout | OutLayout):
    """A layout as it is, farther apart, expanded or misaligned."""
    name = draw(st.sampled_from(["", "", "", "alignment", *layout._fields[:4]]))
    return layout._replace(**{name: draw(st.sampled_from([0, 1, 8, 4096]))}) if name else layout


@pytest.mark.few(0)
@settings(max_examples=300)
@given(problems(), st.sampled_from(EPILOGUES), st.sampled_from(ARCHS), st.integers(1, 150))
def test_lowering_chooses_among_the_variants(made, epilogue, arch, multiprocessors):
    pattern, role, asked = made
    given = epilogue if role == "forward" else ()
    variants = known(epilogue, pattern, arch, None)
    candidates = lowering.candidates(asked, arch)
    assert candidates and lowering.default(asked, multiprocessors, arch) in candidates
    for choice in candidates:
        found = lowering.lower(given, asked, arch, multiprocessors, choice)
        assert {step.spec for step in found.steps} <= variants
        assert all(1 <= step.grid[0] < 2**31 and 1 <= step.grid[1] < 65536 for step in found.steps)
        precision = asked.precision if asked.dtype == "float32" else "tf32"
        assert {s.spec for s in found.steps} <= known(epilogue, pattern, arch, precision)


@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_variants_are_distinct_and_reach_no_header_of_cuda(pattern, arch):
    made = lowering.variants(EPILOGUES[2], pattern, arch, DTYPES, None)
    assert len({spec.canonical() for spec in made}) == len(made)
    assert len({spec.description for spec in made}) == len(made)
    assert max(spec.shared_bytes for spec in made) <= targets.SHARED_BYTES[arch]
    for spec in made:
        assert spec.family == "kronecker_sparse" and not sources.system_includes(spec.source)


def test_variants_of_a_dtype_are_of_that_dtype_alone():
    for dtype in DTYPES:
        made = lowering.variants(EPILOGUES[1], PATTERNS[0], "sm_90a", (dtype,), "fp32")
        assert all(dtype in spec.description.split() for spec in made)
        kinds = {spec.description.split()[1] for spec in made}
        assert {"hopper", "interleaved", "pack", "turn", "portable"} <= kinds
        assert ("gradient" in kinds) == (dtype != "float32")


SAME = {  # by name: two problems, and the kind of kernel that computes both
    "portable": (
        problem(blocks=3, rows=20000), problem(blocks=7, rows=90000, columns=1000, depth=1024),
        "portable",
    ),
    "batch first": (
        problem(blocks=3), problem(blocks=70, rows=999, columns=88, depth=64), "hopper"
    ),
    "batch last": (
        batch_last(lanes=3), batch_last(lanes=9, rows=800, blocks=5, columns=84, depth=8), "hopper"
    ),
    "d = 4": (
        problem(lanes=4, columns=192),
        problem(lanes=4, blocks=9, rows=5, columns=64, depth=1000), "interleaved",
    ),
    "d = 24": (
        problem(lanes=24), problem(lanes=64, blocks=9, rows=5, columns=64, depth=1000),
        "interleaved",
    ),
    "a gradient of a weight": (
        weight_gradient(3, 60, 40, 2, last=True),
        weight_gradient(5, 999, 48, 7, batch=9000, last=True), "gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_sizes_strides_and_patterns_do_not_reach_the_source(name):
    *problems, kind = SAME[name]
    epilogue = () if kind == "gradient" else EPILOGUES[2]
    one, two = (lowered(each, epilogue, kind=kind).steps for each in problems)
    assert [step.spec for step in one] == [step.spec for step in two]
