"""Products with compressed matrices and their gradients on hostile data, in every format, on the
CPU; and matrices that come back as they were."""

from __future__ import annotations

import pytest
import torch

from kernlib import sparse
from tests.families.sparse.cases import DTYPES, FORMATS, same_bits
from tests.support import product_hostile as products

ROWS, COLUMNS, VECTORS = 37, 65, 5
every_format = pytest.mark.parametrize("format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)


def case(name: str, side: str, dtype, rows=ROWS, columns=COLUMNS, vectors=VECTORS):
    given = products.operands(name, side, vectors, columns, rows, (rows, columns), dtype)
    return given._replace(w=products.pruned(given.w))


def check(name: str, side: str, format: str, dtype, **sizes: int) -> None:
    given = case(name, side, dtype, **sizes)
    w = sparse.compress(given.w, format)
    found = products.derivatives(lambda x, _: sparse.matmul(w, x), given, of_weight=False)
    wanted = products.exact(products.dense, given, of_weight=False)
    where = f"{name} {side}, {format}, {dtype}"
    if name == "integers":
        products.check_exact(found, wanted, where)
    wide = products.Operands(*(t.float() for t in given))
    rivals = products.derivatives(products.dense, wide, of_weight=False)
    products.check(found, wanted, {k: v.to(dtype) for k, v in rivals.items()}, where)


@every_dtype
@every_format
def test_products_and_derivatives_meet_the_bar(format, dtype):
    for name, side in products.pairs():
        check(name, side, format, dtype)


@every_dtype
@every_format
def test_sizes_next_to_powers_of_two(format, dtype):
    for size in products.SIZES:
        check("normal", "x", format, dtype, rows=size)
        check("one sign", "w", format, dtype, columns=size)
    for vectors in (1, 15, 16, 17):
        check("heavy tails", "x", format, dtype, vectors=vectors)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@every_format
def test_half_types_of_thousands_of_terms_are_rounded_once(format, dtype):
    for name in ("normal", "one sign", "offset 1e3"):
        check(name, "x", format, dtype, rows=9, columns=4099)


@every_dtype
@every_format
def test_hostile_matrices_come_back_as_they_were(format, dtype):
    for name in products.NAMES:
        w = products.pruned(products.matrix(name, ROWS, COLUMNS, dtype))
        for back in (
            sparse.compress(w, format).to_dense(),
            sparse.compress(w, format).transpose().to_dense().mT,
            sparse.from_csr(*_csr(w), w.shape, format=format).to_dense(),
            sparse.compress(w, format).convert("dense").to_dense(),
        ):
            assert torch.equal(back.isnan(), w.isnan())  # of which "macko" knows one
            assert same_bits(plain(back), plain(w)), f"{name}, {format}"


def plain(w: torch.Tensor) -> torch.Tensor:
    """Without NaN, and without zeros below 0."""
    return torch.where(w.isnan(), 0.0, w) + 0.0


def _csr(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = (w != 0).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=w.shape[0])
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))), columns, w[rows, columns]
