"""Kronecker-sparse products, gradients and second derivatives on hostile data, on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kernlib as kl
from tests.families.kronecker_sparse.repeats import calls
from tests.support import hostile, repeats
from tests.support import product_hostile as products

# The kernels that docs/families/kronecker_sparse_kernels.md lists: wgmma, interleaved, portable.
PATTERNS = ((3, 64, 48, 1), (2, 40, 24, 16), (2, 3, 5, 3))
DTYPES = pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)


def product(pattern: tuple, batch_last: bool, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """kernlib's at "fp32", with the batch first in x and result."""
    factor = kl.KroneckerSparse(*pattern, batch_last=batch_last, precision="fp32")
    if batch_last:
        return kl.run_kernel(factor, x.mT.contiguous(), w).mT
    return kl.run_kernel(factor, x, w)


def check(pattern: tuple, name: str, side: str, dtype, layouts=(False,), rows=200) -> None:
    a, b, c, d = pattern
    sizes = (rows, a * c * d, a * b * d, pattern)
    given = products.operands(name, side, *sizes, dtype, "cuda")
    wanted = products.exact(partial(products.factor, pattern), given)
    where = f"{name} {side}, {pattern}, {dtype}"
    rivals = products.derivatives(partial(products.factor, pattern), given)
    for batch_last in layouts:
        found = products.derivatives(partial(product, pattern, batch_last), given)
        products.check(found, wanted, rivals, f"{where}, {batch_last}", gpu=True)


@DTYPES
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_products_and_derivatives_meet_the_bar(pattern, dtype):
    for name, side in products.pairs():
        check(pattern, name, side, dtype, layouts=(False, True))


@DTYPES
def test_sizes_next_to_powers_of_two(dtype):
    for size in products.SIZES:
        for pattern in ((1, 3, size, 1), (1, size, 3, 2), (size, 2, 1, 1)):
            check(pattern, "normal", "x", dtype, rows=33)
        check((2, 16, 16, 2), "normal", "w", dtype, rows=size)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_types_of_thousands_of_terms_are_rounded_once(dtype):
    for name in ("normal", "one sign", "offset 1e3"):
        check((1, 16, 4100, 1), name, "w", dtype, rows=70)
        check((1, 16, 24, 1), name, "x", dtype, rows=20001)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_integers_are_exact(pattern, dtype):
    a, b, c, d = pattern
    sizes = (200, a * c * d, a * b * d, pattern)
    given = products.operands("integers", "x", *sizes, dtype, "cuda")
    found = products.derivatives(partial(product, pattern, False), given)
    wanted = products.exact(partial(products.factor, pattern), given)
    products.check_exact({"y": found["y"], "by x": found["by x"]}, wanted, f"{pattern}")


@pytest.mark.parametrize("rows", (33, 5000))
def test_the_same_call_has_the_same_bits(rows):
    repeats.same_bits(calls, "cuda", rows)
