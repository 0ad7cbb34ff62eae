"""What formulas refuse, and in which words."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.families.pairwise.formula import plain

X, Y = ("row", "feature"), ("col", "feature")
ST = {"s": "row", "t": "col"}
WRONG_TEXTS = {
    "s * q": (ST, r"'q' is not known to a formula.* in axes, as in \{'q': 'row'\}"),
    "s * i": (ST, "write row for its place"),
    "s < t": (ST, r"is a condition, not a number; where\(s < t, 1, 0\) is one"),
    "s[0] * t": (ST, "has an index; a tensor is read at the pair's row and column"),
    "s.t": (ST, r"is not part of the language; use numbers, row, col.* sum\(term\)"),
    "s @ t": (ST, r"that of two vectors is sum\(x \* y\)"),
    "relu(s) * t": (ST, r"write max\(x, 0\)"),
    "s": (ST, r"does not read \['t'\]"),
    "x * s": ({"x": X, "s": "col"}, r"add them up, as in sum\(x \* ...\)"),
    "sum(s * t)": (ST, "adds up nothing that has features"),
    "sum(sum(x)) * s": ({"x": X, "s": "col"}, "is a sum in a sum"),
    "sum(x, 2, 2) * s": ({"x": X, "s": "col"}, "adds up no feature"),
    "sum(x, 0, k) * s": ({"x": X, "s": "col"}, "is no place of a feature"),
    "sum(x, 1) * s": ({"x": X, "s": "col"}, "is no sum"),
    "s * t + 1e999": (ST, "too large for a float64"),
    "+".join(["s", *["t"] * 6000]): (ST, "has 12001 characters, of at most 10000"),
    "-" * 51 + "s": (ST, "52 operations in one another|51 operations"),
    "s + ": (ST, "does not parse"),
    "s ** 2": ({"s": "row"}, "has the axis 'col'"),
}


@pytest.mark.few(40)
@pytest.mark.parametrize("text", WRONG_TEXTS, ids=lambda text: text[:20])
def test_wrong_texts(text):
    axes, message = WRONG_TEXTS[text]
    with pytest.raises(ValueError, match=message):
        kl.Formula(text, axes)


WRONG_AXES = {
    "repeats": (ValueError, [("s", "row"), ("s", "col")], "axes repeat a name"),
    "twice": (ValueError, {"s": ("row", "row")}, "axes of s repeat one"),
    "spelling": (ValueError, {"s": "rows"}, "axes of s must be of"),
    "none": (TypeError, {"s": None}, "axes of 's' must be a tuple"),
    "kind": (TypeError, None, "axes must be a dict"),
    "word": (ValueError, {"sum": "row"}, "the name 'sum' is a word of the language"),
    "position": (ValueError, {"row": "row"}, "the name 'row' is a word of the language"),
    "argument": (ValueError, {"v": "row"}, "the name 'v' is an argument of calls"),
    "python": (ValueError, {"lambda": "row"}, "is a word of Python"),
    "sign": (ValueError, {"#0": "row"}, "'#0' is not an ASCII identifier"),
    "all": (ValueError, {"s": ("row", "col", "feature")}, "has no features; add them up before"),
}


@pytest.mark.few(20)
@pytest.mark.parametrize("name", WRONG_AXES)
def test_wrong_axes(name):
    error, axes, message = WRONG_AXES[name]
    with pytest.raises(error, match=message):
        kl.Formula("s * t", axes)


AXES = {"x": X, "y": Y, "s": "row", "t": "col", "c": ()}
FORMULA = kl.Formula("exp(-sum((x - y) ** 2) / s) * t + c", AXES)
VALUES = plain.drawn(AXES, dtype=torch.float32)
WRONG_VALUES = {
    "rank": ("x", torch.ones(3), ValueError, r"x must have shape \(row, feature\), or a batch"),
    "rank 0": ("s", torch.ones(()), ValueError, r"s must have shape \(row,\), or a batch of it"),
    "rows": ("s", torch.ones(7), ValueError, "s has rows 7, and x has 5"),
    "columns": ("t", torch.ones(5), ValueError, "t has columns 5, and y has 7"),
    "features": ("y", torch.ones(7, 2), ValueError, "one sum must have as many .*x 3, y 2"),
    "number": ("s", 1.0, TypeError, "s must be a tensor, got float"),
    "complex": ("x", torch.ones(5, 3).cfloat(), TypeError, "x must be of float64.*complex64"),
    "bytes": ("x", torch.ones(5, 3).byte(), TypeError, "x must be of float64.*uint8"),
    "device": ("t", torch.ones(7, device="meta"), ValueError, "t is on meta, others on cpu"),
    "sparse": ("x", torch.ones(5, 3).to_sparse(), TypeError, "x must be a dense tensor"),
    "condition": ("t", torch.ones(7) > 0, ValueError, "'t' is a condition, not a number"),
    "nan": ("c", float("nan"), ValueError, "c must be finite, got nan"),
    "text": ("c", "1", TypeError, "c must be a real number or a tensor"),
    "each column": ("c", torch.ones(7), ValueError, r"c must have shape \(\), got \(7,\), as many"),
    "other": ("z", torch.ones(7), TypeError, "z is no argument of Formula"),
}


@pytest.mark.few(20)
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values(name):
    argument, value, error, message = WRONG_VALUES[name]
    for call in (kl.run_kernel, kl.kernel_sum, kl.kernel_argmin, kl.kernel_topk):
        with pytest.raises(error, match=message):
            call(FORMULA, **VALUES | {argument: value})


def test_wrong_calls():
    with pytest.raises(TypeError, match=r"reads \['c'\]: pass c=\.\.\."):
        kl.run_kernel(FORMULA, **{k: v for k, v in VALUES.items() if k != "c"})
    with pytest.raises(TypeError, match="takes its tensors by name"):
        kl.kernel_sum(FORMULA, VALUES["x"], VALUES["y"])
    with pytest.raises(TypeError, match="takes its tensors by name"):
        kl.run_kernel(FORMULA, VALUES["x"])
    with pytest.raises(ValueError, match="v has columns 3, and y has 7"):
        kl.kernel_matmul(FORMULA, v=torch.ones(3), **VALUES)
    with pytest.raises(TypeError, match="v must be a tensor"):
        kl.kernel_matmul(FORMULA, **VALUES)
    with pytest.raises(ValueError, match="k must be from 1 to the 7 columns, got 8"):
        kl.kernel_topk(FORMULA, k=8, **VALUES)
    with pytest.raises(ValueError, match="a formula says itself where it is"):
        kl.kernel_sum(FORMULA, row_offset=1, **VALUES)
    with pytest.raises(TypeError, match="lengthscale is of points a and b, which Formula"):
        kl.kernel_sum(FORMULA, lengthscale=torch.ones(3), **VALUES)
    with pytest.raises(TypeError, match="descriptor must be a Pairwise"):
        kl.linalg.solve_kernel(FORMULA, VALUES["x"], VALUES["s"], regularization=1.0)


def test_names_that_calls_have_inside_are_free():
    for name in ("t0", "t1", "formula", "points", "values", "a", "b", "self", "reduction"):
        formula = kl.Formula(f"{name} * t2", {name: "row", "t2": "col"})
        values = {name: torch.arange(2.0), "t2": torch.ones(3)}
        assert kl.run_kernel(formula, **values).tolist() == [[0, 0, 0], [1, 1, 1]]
        assert kl.kernel_sum(formula, **values).tolist() == [0, 3]


def test_kernels_are_compiled_of_a_call_alone():
    pytest.importorskip("kernlib.families.pairwise.formula.lowering")
    assert isinstance(kl.compile(FORMULA, specs=(), reduction="kernel_sum", **VALUES), list)
    with pytest.raises(ValueError, match="pass the tensors of a call"):
        kl.compile(FORMULA)
