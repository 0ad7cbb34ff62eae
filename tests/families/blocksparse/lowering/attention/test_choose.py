"""Which kernel of attention, and of its gradients, takes a problem."""

from kernlib.families.blocksparse.lowering.attention import choose
from kernlib.families.blocksparse.lowering.attention.problem import AttentionGradient
from tests.families.blocksparse.lowering.attention import gradients
from tests.families.blocksparse.lowering.attention.cases import (
    ARCH,
    PORTABLE,
    Case,
    Made,
    launches_of,
)


def problems():
    attention = Made(Case(queries=300)).problem()
    return attention, AttentionGradient(attention, *(attention.q,) * 4)


def test_a_choice_may_be_text_and_none_is_by_rule():
    attention, gradient = problems()
    chosen = choose.lower(attention, ARCH, 1, {"kind": "portable", "rows": "64"})
    assert chosen == launches_of(PORTABLE, attention, {"rows": 64})
    assert choose.lower(attention, ARCH, 1) == launches_of(PORTABLE, attention, {"rows": 128})
    damaged = choose.lower(attention, ARCH, 1, {"kind": "other"})
    assert damaged == choose.lower(attention, ARCH, 1)
    knobs = {"depth": 16, "stages": 1}
    chosen = choose.lower(gradient, ARCH, 1, {"kind": "portable", **knobs})
    assert chosen == launches_of(gradients.PORTABLE, gradient, knobs)


def test_variants_have_what_lowering_chooses():
    attention, gradient = problems()
    wide = attention._replace(features=72, values=72)
    found = list(choose.variants(wide.score, ("float16",), ARCH, ((16, 16),), ((72, 72),)))
    assert len(found) == len(set(found))
    for choice in choose.candidates(wide, ARCH):
        assert choose.lower(wide, ARCH, 1, choice).specs[0] in found
    gradient = gradient._replace(attention=wide)
    for choice in choose.candidates(gradient, ARCH):
        assert set(choose.lower(gradient, ARCH, 1, choice).specs) <= set(found)


def test_a_gpu_of_little_shared_memory_has_kernels_for_every_width():
    """sm_86 and its like have 99 KiB."""
    attention, gradient = problems()
    for features in range(16, 257, 8):
        for values in (16, features, 256):
            own = attention._replace(features=features, values=values)
            assert choose.candidates(own, "sm_86")
            assert choose.candidates(gradient._replace(attention=own), "sm_86")
