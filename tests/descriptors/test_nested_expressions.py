"""Expressions nested as deep as is permitted, and deeper; numbers of every kind."""

import ast
import copy
from fractions import Fraction

import numpy as np
import pytest
import torch

import kernlib as kl
from kernlib.descriptors import nesting, text
from kernlib.descriptors.derivative import Derivative, fits
from kernlib.descriptors.text import from_text
from kernlib.lowering.epilogue_source import EpilogueSource


def test_every_real_number_is_one():
    assert kl.LeakyRelu(Fraction(1, 4)) == kl.LeakyRelu(np.float32(0.25)) == kl.LeakyRelu(0.25)
    assert kl.Matern(Fraction(5, 2)) == kl.Matern(np.float64(2.5)) == kl.Matern(2.5)
    for made in (kl.LeakyRelu(Fraction(1, 4)), kl.Matern(Fraction(5, 2))):
        kernel = kl.dot_product(epilogue=made)
        assert from_text(kernel.text) == kernel


NESTED = {
    "parentheses": lambda n: "(" * n + "v" + ")" * n,
    "signs": lambda n: "-" * n + "v",
    "functions": lambda n: "sin(" * n + "v" + ")" * n,
    "a sum": lambda n: " + ".join(["v"] * (n + 1)),
    "powers": lambda n: "v" + " ** 1" * n,
    "quotients": lambda n: "v" + " / 2" * n,
    "maxima": lambda n: "max(1, " * n + "v" + ")" * n,
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("depth", [101, 300, nesting.DEEPEST + 1])
def test_expressions_nested_too_deep_are_refused(kind, depth):
    if kind == "parentheses" and depth == 101:
        return  # which are no operations
    with pytest.raises(ValueError, match=r"does not parse|operations in one another"):
        kl.Custom(NESTED[kind](depth))


def sizes(depth, count):
    """Texts of so many operations in one another, and of so many characters."""
    deep = {kind: NESTED[kind](depth) for kind in NESTED if kind != "parentheses"}
    return deep | {"long": "v" * count, "no end": "(" * depth, "words": "not " * depth + "v"}


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", sizes(0, 0))
def test_no_parser_sees_a_text_beyond_the_bounds(kind, monkeypatch):
    def refuse(*_, **__):
        raise SyntaxError("it was parsed")

    wide = sizes(nesting.DEEPEST + 1, nesting.LONGEST + 1)[kind]
    wider = sizes(text.DEEPEST + 1, text.LONGEST + 1)[kind]
    for make, given in (
        (kl.Custom, wide),
        (lambda score: kl.BlockSparseAttention(score=score), wide),
        (lambda mask: kl.BlockSparseAttention(mask=mask), wide),
        (from_text, wider),
    ):
        with (
            pytest.raises(ValueError, match=r"(characters|in one another), of at most \d+"),
            monkeypatch.context() as patched,
        ):
            patched.setattr(ast, "parse", refuse)
            make(given)


@pytest.mark.parametrize("kind", NESTED)
def test_whatever_is_permitted_can_be_computed_and_has_a_text_and_a_derivative(kind):
    """With the frames of Python that a program of some depth leaves."""
    epilogue = kl.Custom(NESTED[kind](100))
    kernel = kl.dot_product(epilogue=epilogue)
    assert from_text(kernel.text) == kernel == copy.deepcopy(kernel)

    def all_of_it(deeper):
        if deeper:
            return all_of_it(deeper - 1)
        x = torch.full((2, 1), 0.5, dtype=torch.float64, requires_grad=True)
        kl.run_kernel(kernel, x, x.detach()).sum().backward()
        EpilogueSource((epilogue,), "0")
        if fits("Identity", (epilogue,), False):
            EpilogueSource((Derivative("Identity", (epilogue,)),), "0")
        return x.grad.isfinite().all()

    assert all_of_it(200)
