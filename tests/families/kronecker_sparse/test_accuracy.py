"""Kronecker-sparse products, gradients and second derivatives on hostile data, on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import reference
from kernlib.nn import KSLinear
from tests.families.kronecker_sparse.fake_kernels import gpu
from tests.nn.kronecker_sparse_cases import ALGOS
from tests.support import hostile
from tests.support import product_hostile as products

PATTERNS = ((2, 3, 5, 4), (1, 9, 33, 1), (3, 8, 8, 2), (1, 1, 1, 1))
DTYPES = pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)


def product(pattern: tuple, batch_last: bool, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """kernlib's, with the batch first in x and result."""
    factor = kl.KroneckerSparse(*pattern, batch_last=batch_last)
    return kl.run_kernel(factor, x.mT, w).mT if batch_last else kl.run_kernel(factor, x, w)


def case(name: str, side: str, pattern: tuple, dtype, rows: int = 33) -> products.Operands:
    a, b, c, d = pattern
    return products.operands(name, side, rows, a * c * d, a * b * d, pattern, dtype)


def check(pattern: tuple, name: str, side: str, dtype, batch_last=False, rows: int = 33) -> None:
    given = case(name, side, pattern, dtype, rows)
    found = products.derivatives(partial(product, pattern, batch_last), given)
    wanted = products.exact(partial(products.factor, pattern), given)
    where = f"{name} {side}, {pattern}, {dtype}"
    if name == "integers":
        products.check_exact(found, wanted, where)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rivals = products.derivatives(
        partial(products.factor, pattern), products.Operands(*(t.to(wide) for t in given))
    )
    products.check(found, wanted, {k: v.to(dtype) for k, v in rivals.items()}, where)


@DTYPES
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_products_and_derivatives_meet_the_bar(pattern, dtype):
    for name, side in products.pairs():
        for batch_last in (False, True):
            check(pattern, name, side, dtype, batch_last)


@DTYPES
def test_sizes_next_to_powers_of_two(dtype):
    for size in products.SIZES:
        for pattern in ((1, 3, size, 1), (1, size, 3, 2), (size, 2, 1, 1)):
            check(pattern, "normal", "x", dtype)
        check((2, 3, 5, 1), "one sign", "x", dtype, rows=size)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_types_of_thousands_of_terms_are_rounded_once(dtype):
    for name in ("normal", "one sign", "offset 1e3"):
        check((1, 4, 4099, 1), name, "w", dtype, rows=7)
        check((1, 4, 5, 1), name, "x", dtype, rows=5003)


@DTYPES
def test_zeros_give_zeros(dtype):
    given = case("normal", "x", (2, 3, 5, 4), dtype)
    for side in ("x", "w"):
        zero = given._replace(**{side: torch.zeros_like(getattr(given, side))})
        found = products.derivatives(partial(product, (2, 3, 5, 4), False), zero)
        assert not found["y"].any()


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_every_algorithm_of_a_layer_meets_the_bar_on_finite_data(algo, dtype):
    pattern = (2, 3, 5, 4)
    for name, side in products.pairs(products.FINITE):
        given = case(name, side, pattern, dtype)
        layer = KSLinear([pattern], weights=[given.w], bias=False, algo=algo)
        wanted, terms = products.exact(partial(products.factor, pattern), given)
        x = given.x.clone().requires_grad_()
        y = layer(x)
        by_x, by_w = torch.autograd.grad(y, (x, layer.factors[0]), given.g)
        found = {"y": y.detach(), "by x": by_x, "by w": by_w}
        rival = products.derivatives(partial(products.factor, pattern), given)
        products.check(found, (wanted, terms), rival, f"{algo}, {name} {side}, {dtype}")


def test_an_infinity_stays_in_its_vector_and_block():
    pattern = (2, 3, 5, 4)
    given = case("normal", "x", pattern, torch.float32)
    clean = product(pattern, False, given.x, given.w)
    for value in (torch.inf, torch.nan):
        x = given.x.clone()
        x[7, 9] = value  # of block i = 0, lane l = 1
        found = product(pattern, False, x, given.w)
        touched = torch.zeros_like(found, dtype=torch.bool)
        touched[7, 1:12:4] = True
        assert not found[touched].isfinite().any()
        assert torch.equal(found[~touched], clean[~touched])


@pytest.mark.few(3)
@pytest.mark.parametrize("precision", [None, "fp32", "tf32"])
def test_what_torch_computes_is_in_tf32_only_with_leave(precision, monkeypatch):
    einsum, seen = torch.einsum, []

    def noted(terms, *tensors):
        seen.append(tensors[0].dtype)
        return einsum(terms, *tensors)

    monkeypatch.setattr(torch, "einsum", noted)
    monkeypatch.setattr(reference, "float32_precision", lambda: "tf32")
    pattern = PATTERNS[0]
    descriptor = kl.KroneckerSparse(*pattern, precision=precision)
    x, grad = gpu(6, descriptor.in_features), gpu(6, descriptor.out_features)
    found = reference.kronecker_sparse(descriptor, x, gpu(*pattern))
    summed = reference.weight_gradient(pattern, grad, x, False, precision)
    assert found.dtype == summed.dtype == torch.float32
    assert seen == [torch.float64 if precision == "fp32" else torch.float32] * 2
