"""What is said of calls with categories that are wrong."""

import re

import pytest
import torch

import kernlib as kl
from kernlib import linalg
from tests.families.pairwise.categories.cases import drawn

CASE = drawn(6, 5, 3, (4, 4))
GAUSSIAN = kl.gaussian(categories=2)


def refused(kind, words, descriptor=GAUSSIAN, **changes):
    given = {"a": CASE.a, "b": CASE.b, **CASE.codes, "bandwidth": 2.0} | changes
    given = {name: value for name, value in given.items() if value is not ...}
    with pytest.raises(kind, match=re.escape(words)):
        kl.run_kernel(descriptor, **given)


@pytest.mark.parametrize("name", ["a_codes", "b_codes", "tables"])
def test_what_is_missing(name):
    refused(TypeError, f"needs {name}: the call is run_kernel(descriptor, a, b, ", **{name: ...})


def test_what_is_misspelt():
    words = "tabels is no argument of gaussian(categories=2); it takes a_codes, b_codes, tables, "
    words += "bandwidth, epsilon, regularization; did you mean tables?"
    refused(TypeError, words, tables=..., tabels=CASE.tables)
    refused(TypeError, words, tabels=torch.stack(CASE.tables))
    with pytest.raises(TypeError, match=re.escape(words)):
        v = torch.ones(5, 1).double()
        codes = {"a_codes": CASE.a_codes, "b_codes": CASE.b_codes, "tabels": CASE.tables}
        kl.kernel_matmul(GAUSSIAN, CASE.a, CASE.b, v, **codes, bandwidth=2.0)
    refused(TypeError, "it takes a_codes, b_codes, tables, bandwidth,", bandwith=1.0)
    refused(ValueError, "p needs inner=Power(), and gaussian has another", p=1.0)
    plain = kl.l2_distance(categories=2)
    refused(ValueError, "epsilon needs an epilogue, and", plain, epsilon=1.0, bandwidth=...)


def test_codes():
    refused(TypeError, "a_codes must be one of int64, int32", a_codes=CASE.a_codes.double())
    refused(TypeError, "b_codes must be one of int64, int32", b_codes=CASE.b_codes.bool())
    refused(TypeError, "a_codes must be a tensor, got list", a_codes=[[0, 1]] * 6)
    refused(ValueError, "a_codes must be (N, 2) or (L, N, 2)", a_codes=CASE.a_codes[:, :1])
    refused(ValueError, "a row for each of the 5 points of b", b_codes=CASE.a_codes)
    refused(ValueError, "must be on the inputs' device", a_codes=CASE.a_codes.to("meta"))


def test_tables():
    whole = torch.stack(CASE.tables)
    refused(ValueError, "tables must be (2, S, S) or (L, 2, S, S)", tables=whole[:1])
    refused(ValueError, "tables must be (2, S, S) or (L, 2, S, S)", tables=whole[..., :3])
    refused(ValueError, "tables must be 2 tables, one for each", tables=CASE.tables[:1])
    refused(ValueError, "tables[1] must be (S, S)", tables=[whole[0], whole[0, :3]])
    refused(TypeError, "tables must be a tensor or a list", tables=3.0)
    refused(TypeError, "tables[0] must be a tensor", tables=[None, whole[0]])
    refused(TypeError, "tables must be torch.float64", tables=whole.float())
    refused(ValueError, "a category each at least", tables=[whole[0], whole[0, :0, :0]])


def test_batches_that_differ():
    codes = CASE.a_codes.expand(3, -1, -1)
    refused(ValueError, "batches must be 1 or equal", a_codes=codes, a=CASE.a.expand(2, -1, -1))
    refused(ValueError, "batches must be 1 or equal", a_codes=codes,
            bandwidth=torch.ones(2, dtype=torch.float64))  # fmt: skip


def test_out():
    refused(ValueError, "out must have shape (6, 5)", out=torch.zeros(5, 6, dtype=torch.float64))
    whole = torch.zeros(2, 5, 5, dtype=torch.float64)
    square = drawn(5, 5, 3, (5, 5))
    with pytest.raises(ValueError, match="out shares memory with tables"):
        square._replace(tables=whole).run(GAUSSIAN, bandwidth=2.0, out=whole[1])
    tables = CASE.tables[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="tables requires a gradient"):
        out = torch.zeros(6, 5, dtype=torch.float64)
        CASE._replace(tables=torch.stack([tables] * 2)).run(GAUSSIAN, bandwidth=2.0, out=out)


def test_hyperparameters_and_p_without_a_sum():
    refused(ValueError, "bandwidth must be greater than 0", bandwidth=-1.0)
    refused(ValueError, "needs bandwidth", bandwidth=...)
    refused(TypeError, "sigma is no argument of", sigma=1.0)
    words, infinite = "p must be finite: tables add to sums", torch.tensor(float("inf"))
    refused(ValueError, words, kl.p_distance(categories=2), p=float("inf"), bandwidth=...)
    refused(ValueError, words, kl.p_distance(categories=2), p=infinite.double(), bandwidth=...)


def test_a_second_set_of_points_is_needed():
    refused(ValueError, "b is missing; for K(a, a) pass a and its codes twice", b=None)


def test_codes_without_categories():
    refused(TypeError, "a_codes needs categories in the descriptor", kl.gaussian())


@pytest.mark.parametrize("count", [True, 1.0, "2", None])
def test_a_count_that_is_none(count):
    with pytest.raises(TypeError, match="categories must be an int"):
        kl.gaussian(categories=count)


def test_counts_out_of_range_and_symmetric_ones():
    for count in (-1, 129):
        with pytest.raises(ValueError, match=f"categories must be from 0 to 128, got {count}"):
            kl.gaussian(categories=count)
    with pytest.raises(ValueError, match="symmetric=True takes no categories"):
        kl.gaussian(symmetric=True, categories=1)


def test_what_takes_no_categories_says_so():
    calls = {
        "agop": lambda: kl.agop(GAUSSIAN, CASE.a, CASE.b, torch.ones(1, 5).double(), bandwidth=2.0),
        "prepare": lambda: kl.prepare(GAUSSIAN, CASE.a, CASE.b, **CASE.codes, bandwidth=2.0),
        "prepare of a reduction": lambda: kl.prepare(
            GAUSSIAN, CASE.a, CASE.b, **CASE.codes, bandwidth=2.0, reduction="kernel_sum"
        ),
        "tune": lambda: kl.tune(GAUSSIAN, CASE.a, CASE.b, **CASE.codes, bandwidth=2.0),
        "nystrom": lambda: linalg.nystrom(GAUSSIAN, CASE.a, 2, regularization=1.0, bandwidth=2.0),
        "solve": lambda: linalg.solve_kernel(
            GAUSSIAN, CASE.a, CASE.a[:, 0], regularization=1.0, bandwidth=2.0
        ),
    }
    with pytest.raises(ValueError, match=r"^gaussian.* has categories, and agop takes no categor"):
        calls["agop"]()
    for name, call in calls.items():
        with pytest.raises((TypeError, ValueError), match="categories"):
            print(name, call())
