"""Descriptors of block-sparse products."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernlib as kl
from kernlib.descriptors.text import from_text, to_text
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from tests.families.blocksparse.cases import MODES, TURNS

PLAIN = BlockSparseMatmul("sdd")
FULL = BlockSparseMatmul(
    "dds",
    transpose_a=True,
    transpose_b=True,
    epilogue=(kl.Bias(), kl.Gelu("tanh")),
    precision="tf32",
)
NAMED = {"plain": PLAIN, "full": FULL}

# Saved programs hold these texts, and kernels are kept under keys made of these bytes.
TEXTS = {
    "plain": "BlockSparseMatmul(mode='sdd', transpose_a=False, transpose_b=False, epilogue=(), "
    "precision=None)",
    "full": "BlockSparseMatmul(mode='dds', transpose_a=True, transpose_b=True, "
    "epilogue=(Bias(parameter='bias'), Gelu(approximate='tanh')), precision='tf32')",
}


@pytest.mark.parametrize("name", NAMED)
def test_the_text_is_that_of_every_earlier_release(name):
    made = NAMED[name]
    assert to_text(made) == made.text == TEXTS[name]
    assert from_text(TEXTS[name]) == made


def test_descriptors_differ_in_value_text_and_bytes():
    made = [BlockSparseMatmul(m, transpose_a=a, transpose_b=b) for m in MODES for a, b in TURNS]
    made += [PLAIN.replace(precision=p) for p in ("fp32", "tf32", "bf16")]
    made += [FULL.replace(epilogue=e) for e in ((), kl.Relu(), kl.Bias(), kl.Bias("late"))]
    for each in (set, lambda x: {d.text for d in x}, lambda x: {d.canonical() for d in x}):
        assert len(each(made)) == len(made)


def test_what_is_written_in_two_ways_is_one():
    assert PLAIN.replace(epilogue=kl.Relu()) == PLAIN.replace(epilogue=[kl.Relu()])
    assert BlockSparseMatmul("dsd", epilogue=None) == BlockSparseMatmul(mode="dsd")


@given(
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "fp32", "tf32", "bf16"]),
)
def test_what_follows_from_the_fields(mode, of_a, of_b, precision):
    made = BlockSparseMatmul(mode, transpose_a=of_a, transpose_b=of_b, precision=precision)
    assert from_text(made.text) == made == pickle.loads(pickle.dumps(made)) == made.replace()
    assert made.transposed is {"sdd": False, "dsd": of_a, "dds": of_b}[mode]
    assert made.axis == (-2 if mode == "dsd" else -1)
    assert made.family == "blocksparse"


def test_parameters_come_in_order_and_know_their_kind():
    ends = (kl.Bias(), kl.Scale(), kl.Add(), kl.Laplace(), kl.Bias("late"))
    made = BlockSparseMatmul("dsd", epilogue=ends)
    assert made.parameters == ("bias", "scale", "beta", "y", "bandwidth", "late")
    assert made.vectors == ("bias", "late") and made.summands == ("y",)
    assert made.positive == {"bandwidth"}


def test_what_people_read():
    assert PLAIN.describe() == "BlockSparseMatmul(sdd)"
    assert FULL.describe() == (
        "BlockSparseMatmul(dds, transpose_a, transpose_b, Bias(parameter='bias'), "
        "Gelu(approximate='tanh'))"
    )


@pytest.mark.parametrize("mode", ["DSD", "", None, 3, ["dsd"], b"dsd"])
def test_another_mode_is_a_value_error(mode):
    with pytest.raises(ValueError, match=r"mode must be one of \('sdd', 'dsd', 'dds'\), got"):
        BlockSparseMatmul(mode)


def test_what_is_no_epilogue_is_refused():
    for ends in (kl.Relu, (kl.Relu(), 1), [[kl.Relu()]], kl.gaussian()):
        with pytest.raises(TypeError, match="epilogue must be made of epilogues"):
            BlockSparseMatmul("dsd", epilogue=ends)
    with pytest.raises(TypeError, match="positional"):
        BlockSparseMatmul("dsd", True)


def test_blocks_have_no_features():
    for ends in (kl.Bias(), (kl.Relu(), kl.Bias("late"))):
        with pytest.raises(ValueError, match="mode 'sdd' takes no epilogue with a value for each"):
            BlockSparseMatmul("sdd", epilogue=ends)
        with pytest.raises(ValueError, match="mode 'sdd' takes no epilogue"):
            BlockSparseMatmul("dsd", epilogue=ends).replace(mode="sdd")
