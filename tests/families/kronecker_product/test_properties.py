"""What holds of all products with Kronecker products, whatever their sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.kronecker_product import reference
from tests.families.kronecker_product.cases import MANY, SIDES, dense, operands, product, randn

size = st.integers(1, 6)
shapes = st.lists(st.tuples(size, size), min_size=1, max_size=4).map(tuple)
sides = st.sampled_from(SIDES)
rows = st.integers(0, 4)
seeds = st.integers(0, 10**6)


def close(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def given_operands(shapes, rows, side, seed):
    torch.manual_seed(seed)
    return operands(shapes, rows, side)


@settings(max_examples=60)
@given(shapes, rows, sides, seeds)
def test_left_is_the_transpose_of_right(shapes, rows, side, seed):
    x, factors = given_operands(shapes, rows, side, seed)
    other = SIDES[side == "right"]
    turned = kl.kron_matmul(x.mT, [f.mT for f in factors], side=other)
    found = kl.kron_matmul(x, factors, side=side)
    close(found, turned.mT)
    close(found, product(x, factors, side))
    made = kl.KroneckerProduct(shapes, side=side, transposed=True)
    close(kl.run_kernel(made, x, *(f.mT for f in factors)), found)


@settings(max_examples=30)
@given(shapes, st.lists(st.integers(0, 3), max_size=3).map(tuple), sides, seeds)
def test_a_batch_is_its_parts(shapes, batch, side, seed):
    torch.manual_seed(seed)
    made = kl.KroneckerProduct(shapes, side=side)
    tail = (2, made.in_features) if side == "right" else (made.in_features, 2)
    x, factors = randn(*batch, *tail), [randn(*batch, *shape) for shape in shapes]
    found = kl.kron_matmul(x, factors, side=side)
    flat = [t.reshape(-1, *t.shape[-2:]) if 0 not in batch else t for t in (x, *factors, found)]
    for parts in zip(*flat, strict=True) if 0 not in batch else ():
        close(kl.kron_matmul(parts[0], parts[1:-1], side=side), parts[-1])
    assert found.shape[:-2] == batch


@pytest.mark.parametrize("name", MANY)
def test_the_reference_applies_factors_in_any_order(name, seed):
    """The order that it takes is by sizes; the same factors one by one give the same."""
    x, factors = operands(MANY[name], 3)
    found, sizes = x, [f.shape[0] for f in factors]
    for index in reversed(range(len(factors))):
        found = found.reshape(3, *sizes).movedim(1 + index, -1) @ factors[index]
        sizes[index] = factors[index].shape[1]
        found = found.movedim(-1, 1 + index)
    close(kl.kron_matmul(x, factors), found.reshape(3, -1))
    merged = reference.merged(factors)
    assert len(merged) <= len(factors)
    close(dense(merged), dense(factors))
