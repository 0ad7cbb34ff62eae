"""Descriptors of products with Kronecker products."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernlib as kl
from kernlib.descriptors.text import from_text, to_text
from tests.families.kronecker_product.cases import dense, randn

PLAIN = kl.KroneckerProduct(((2, 3), (4, 5)))
FULL = kl.KroneckerProduct(
    (3, (4, 5), (1, 2)),
    side="left",
    transposed=(True, False, True),
    epilogue=(kl.Bias(), kl.Gelu("tanh")),
    precision="tf32",
)
ONE = kl.KroneckerProduct([7])
NAMED = {"plain": PLAIN, "full": FULL, "one": ONE}

# Saved programs hold these texts, and kernels are kept under keys made of these bytes.
TEXTS = {
    "plain": "KroneckerProduct(shapes=((2, 3), (4, 5)), side='right', transposed=(False, False), "
    "epilogue=(), precision=None)",
    "full": "KroneckerProduct(shapes=((3, 3), (4, 5), (1, 2)), side='left', "
    "transposed=(True, False, True), epilogue=(Bias(parameter='bias'), Gelu(approximate='tanh')), "
    "precision='tf32')",
    "one": "KroneckerProduct(shapes=((7, 7),), side='right', transposed=(False,), epilogue=(), "
    "precision=None)",
}


def rebuilt(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("name", NAMED)
def test_the_text_is_that_of_every_earlier_release_and_of_every_clone(name):
    made = NAMED[name]
    assert to_text(made) == made.text == TEXTS[name]
    assert from_text(TEXTS[name]) == made
    for clone in (copy.copy, copy.deepcopy, rebuilt, lambda d: d.replace()):
        other = clone(made)
        assert other == made and hash(other) == hash(made)
        assert other.text == made.text and other.canonical() == made.canonical()


def test_descriptors_differ_in_value_text_and_bytes():
    made = [PLAIN, FULL, ONE, PLAIN.replace(side="left"), PLAIN.replace(precision="fp32")]
    made += [PLAIN.replace(transposed=flags) for flags in (True, (True, False), (False, True))]
    made += [kl.KroneckerProduct(shapes) for shapes in (((4, 5), (2, 3)), ((8, 15),), (2, 4))]
    made += [PLAIN.replace(epilogue=e) for e in (kl.Relu(), kl.Silu(), kl.Bias(), kl.Bias("b2"))]
    for each in (set, lambda x: {d.text for d in x}, lambda x: {d.canonical() for d in x}):
        assert len(each(made)) == len(made)


def test_what_is_written_in_two_ways_is_one():
    assert kl.KroneckerProduct((3, (4, 5))) == kl.KroneckerProduct([[3, 3], (4, 5)])
    assert PLAIN.replace(transposed=True) == PLAIN.replace(transposed=[True, True])
    assert PLAIN.replace(epilogue=kl.Relu()) == PLAIN.replace(epilogue=(kl.Relu(),))
    assert PLAIN.shapes == ((2, 3), (4, 5)) and PLAIN.transposed == (False, False)


size = st.integers(1, 6)
shapes = st.lists(st.tuples(size, size), min_size=1, max_size=4).map(tuple)


@given(shapes, st.sampled_from(["right", "left"]), st.data())
def test_what_follows_from_the_shapes(shapes, side, data):
    flags = tuple(data.draw(st.booleans()) for _ in shapes)
    precision = data.draw(st.sampled_from([None, "fp32", "tf32", "bf16"]))
    made = kl.KroneckerProduct(shapes, side=side, transposed=flags, precision=precision)
    matrix = dense([randn(*shape) for shape in shapes])
    ends = tuple(matrix.shape) if side == "right" else tuple(matrix.shape[::-1])
    assert (made.in_features, made.out_features) == ends
    assert made.axis == (-1 if side == "right" else -2)
    assert made.factor_shapes == tuple(
        shape[::-1] if turned else shape for shape, turned in zip(shapes, flags, strict=True)
    )
    assert from_text(made.text) == made == rebuilt(made)


def test_parameters_come_in_order_and_know_their_kind():
    made = PLAIN.replace(epilogue=(kl.Bias(), kl.Scale(), kl.Laplace(), kl.Bias("late")))
    assert made.parameters == ("bias", "scale", "bandwidth", "late")
    assert made.vectors == ("bias", "late") and made.positive == {"bandwidth"}


def test_many_factors_and_large_ones():
    made = kl.KroneckerProduct((1,) * 65)
    assert (made.in_features, made.out_features) == (1, 1)
    made = kl.KroneckerProduct((2,) * 59)
    assert made.in_features == made.out_features == 2**59
    assert from_text(made.text) == made


DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]


def of(shapes, **fields):
    return lambda: kl.KroneckerProduct(shapes, **fields)


VALUE_ERRORS = {
    "none": (of(()), "shapes must hold at least one factor's"),
    "rows 0": (of(((0, 1),)), r"shapes\[0\] must hold sizes above 0, got \(0, 1\)"),
    "columns -1": (of((2, (1, -1))), r"shapes\[1\] must hold sizes above 0, got \(1, -1\)"),
    "-many digits": (of((-(10**5000),)), r"shapes\[0\] must .* above 0, got int of many digits"),
    "many rows": (of(((2**30, 1),) * 2), r"the rows of shapes multiply to 2\*\*60 or more"),
    "many columns": (of(((1, 2**60),)), r"the columns of shapes multiply to 2\*\*60 or more"),
    "many digits": (of((10**5000,)), r"the rows of shapes multiply to 2\*\*60 or more"),
    "65 of 2": (of((2,) * 65), "the rows of shapes multiply"),
    "side": (of((2,), side="top"), r"side must be one of \('right', 'left'\), got 'top'"),
    "flags": (of((2, 3), transposed=(True,)), r"transposed must hold 2 bools.*got \(True,\)"),
    "precision": (of((2,), precision="fp8"), "precision must be .*'fp8'"),
    "two biases": (of((2,), epilogue=(kl.Bias(), kl.Bias())), "share.*'bias'"),
    "bias x": (lambda: PLAIN.replace(epilogue=kl.Bias("x")), "'x' is taken"),
}
TYPE_ERRORS = {
    "int": (of(5), "shapes must be a tuple of .*got 5"),
    "three sizes": (of(((1, 2, 3),)), r"shapes\[0\] must be \(rows, columns\), got \(1, 2, 3\)"),
    "float": (of((2, (1.0, 2))), r"shapes\[1\] must hold ints, got \(1\.0, 2\)"),
    "bool": (of((True,)), r"shapes\[0\] must be \(rows, columns\), got True"),
    "a size of bool": (of(((True, 2),)), r"shapes\[0\] must hold ints, got \(True, 2\)"),
    "deep": (of((DEEP,)), r"shapes\[0\] must be \(rows, columns\), got \[\["),
    "flag 1": (of((2,), transposed=1), "transposed must be a bool, or one for each .*got 1"),
    "positions": (lambda: kl.KroneckerProduct((2,), "left"), "positional"),
    "unknown": (of((2,), batch_last=True), "batch_last"),
    "missing": (lambda: kl.KroneckerProduct(), "shapes"),
}


@pytest.mark.parametrize("case", VALUE_ERRORS)
def test_what_makes_no_sense_is_refused_and_said_why(case):
    build, message = VALUE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_parts_of_another_kind_are_type_errors(case):
    build, message = TYPE_ERRORS[case]
    with pytest.raises(TypeError, match=message):
        build()


@pytest.mark.parametrize("name", ["factors", "alpha", "beta", "y", "side", "precision"])
def test_parameters_may_have_names_that_run_kernel_does_not_know(name):
    assert PLAIN.replace(epilogue=kl.Bias(name)).parameters == (name,)
