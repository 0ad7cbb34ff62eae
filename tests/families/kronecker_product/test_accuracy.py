"""Kronecker products, their gradients and second derivatives on hostile data, on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kernlib as kl
from tests.support import hostile
from tests.support import product_hostile as products
from tests.support.speeds import slow_but

# Of the factor whose neighbour is hostile, or x: sizes of both, which stands first.
SHAPES = (
    ((2, 3), (4, 5)),
    ((9, 33), (3, 2)),
    ((8, 8), (8, 8)),
    ((1, 1), (31, 7)),
    ((17, 1), (1, 5)),
)
DTYPES = pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)


def product(side: str, fixed: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """kernlib's, with rows in front in x and the result."""
    if side == "right":
        return kl.kron_matmul(x, [w, fixed])
    return kl.kron_matmul(x.mT, [w.mT, fixed.mT], side="left").mT


def plain(fixed: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ torch.kron(w, fixed)


def exact(fixed: torch.Tensor, given: products.Operands) -> tuple[dict, dict]:
    """In float64, and the sums of absolute terms."""
    fixed, wide = fixed.double(), products.Operands(*(t.double() for t in given))
    absolute = products.Operands(*(t.abs() for t in wide))
    return (
        products.derivatives(partial(plain, fixed), wide),
        products.derivatives(partial(plain, fixed.abs()), absolute),
    )


def case(name: str, hostile_one: str, shapes: tuple, dtype, rows: int = 33):
    """Operands, and the factor that is always normal, or of integers or one sign."""
    wide, out = (first * second for first, second in zip(*shapes, strict=True))
    given = products.operands(name, hostile_one, rows, wide, out, shapes[0], dtype)
    calm = name if name in ("one sign", "integers") else "normal"
    return given, products.matrix(calm, *shapes[1], dtype, seed=5)


def check(shapes: tuple, name: str, hostile_one: str, dtype, side="right", rows: int = 33) -> None:
    given, fixed = case(name, hostile_one, shapes, dtype, rows)
    found = products.derivatives(partial(product, side, fixed), given)
    wanted = exact(fixed, given)
    where = f"{name} {hostile_one}, {shapes}, {dtype}, {side}"
    if name == "integers":
        products.check_exact(found, wanted, where)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rivals = products.derivatives(
        partial(plain, fixed.to(wide)), products.Operands(*(t.to(wide) for t in given))
    )
    if name == "rows of inf":
        same_places(found, wanted[0], where)
    products.check(found, wanted, {k: v.to(dtype) for k, v in rivals.items()}, where)


def same_places(found: dict, wanted: dict, where: str) -> None:
    """Which terms meet first decides between an infinity and NaN: elements are infinite or NaN
    where they are in the sum of all terms."""
    for name, out in found.items():
        spoilt = ~wanted[name].isfinite()
        assert torch.equal(~out.isfinite(), spoilt), f"{where}, {name}"
        out[spoilt] = wanted[name][spoilt].to(out.dtype)


@DTYPES
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("shapes", slow_but(SHAPES[:1], SHAPES), ids=str)
def test_products_and_derivatives_meet_the_bar(shapes, side, dtype):
    for name, hostile_one in products.pairs():
        check(shapes, name, hostile_one, dtype, side)


@DTYPES
def test_sizes_next_to_powers_of_two(dtype):
    for size in products.SIZES:
        check(((size, 3), (2, 2)), "normal", "x", dtype)
        check(((3, size), (2, 2)), "normal", "x", dtype)
        check(((2, 3), (4, 5)), "one sign", "x", dtype, rows=size)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_types_of_thousands_of_terms_are_rounded_once(dtype):
    for name in ("normal", "one sign", "offset 1e3"):
        check(((1031, 2), (4, 1)), name, "w", dtype, rows=7)
        check(((2, 3), (2, 2)), name, "x", dtype, rows=5003)


@DTYPES
def test_zeros_give_zeros(dtype):
    given, fixed = case("normal", "x", SHAPES[0], dtype)
    for side in ("x", "w"):
        zero = given._replace(**{side: torch.zeros_like(getattr(given, side))})
        assert not products.derivatives(partial(product, "right", fixed), zero)["y"].any()
