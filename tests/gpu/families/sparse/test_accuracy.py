"""Products with compressed matrices and their gradients on hostile data, on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernlib import sparse
from tests.families.sparse.cases import DTYPES, FORMATS, same_bits
from tests.families.sparse.repeats import calls
from tests.support import product_hostile as products
from tests.support import repeats

every_format = pytest.mark.parametrize("format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)


def case(name: str, side: str, dtype, rows=137, columns=265, vectors=5):
    sizes = (vectors, columns, rows, (rows, columns))
    given = products.operands(name, side, *sizes, dtype, "cuda")
    return given._replace(w=products.pruned(given.w))


def check(name: str, side: str, format: str, dtype, **sizes: int) -> None:
    given = case(name, side, dtype, **sizes)
    w = sparse.compress(given.w, format)
    found = products.derivatives(lambda x, _: sparse.matmul(w, x), given, of_weight=False)
    wanted = products.exact(products.dense, given, of_weight=False)
    rivals = products.derivatives(products.dense, given, of_weight=False)
    products.check(found, wanted, rivals, f"{name} {side}, {format}, {dtype}", gpu=True)


@every_dtype
@every_format
def test_products_and_derivatives_meet_the_bar(format, dtype):
    """What is not finite is held by test_values.py, as formats differ in zeros times those."""
    for name, side in products.pairs(products.FINITE):
        for vectors in (1, 5):
            check(name, side, format, dtype, vectors=vectors)


@every_dtype
@every_format
def test_sizes_next_to_powers_of_two(format, dtype):
    for size in products.SIZES:
        check("normal", "x", format, dtype, rows=size)
        check("normal", "w", format, dtype, columns=size)
    for vectors in (15, 16, 17):
        check("heavy tails", "x", format, dtype, vectors=vectors)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@every_format
def test_half_types_of_thousands_of_terms_are_rounded_once(format, dtype):
    for name in ("normal", "one sign", "offset 1e3"):
        for vectors in (1, 8):
            check(name, "x", format, dtype, rows=70, columns=8195, vectors=vectors)


@every_dtype
@every_format
def test_hostile_matrices_come_back_as_they_were(format, dtype):
    for name in products.NAMES:
        w = products.pruned(products.matrix(name, 137, 265, dtype, "cuda"))
        for back in (
            sparse.compress(w, format).to_dense(),
            sparse.compress(w, format).transpose().to_dense().mT,
            sparse.compress(w.cpu(), format).to("cuda").to_dense(),
        ):
            assert torch.equal(back.isnan(), w.isnan())  # of which "macko" knows one
            plain = (torch.where(t.isnan(), 0.0, t) + 0.0 for t in (back, w))
            assert same_bits(*plain), f"{name}, {format}"


def test_the_same_call_has_the_same_bits():
    repeats.same_bits(calls, "cuda", rows=1)
