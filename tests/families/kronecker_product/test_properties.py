"""What holds of all products with Kronecker products, whatever their sizes."""

from functools import reduce

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


@settings(max_examples=40)
@given(shapes, sides, seeds)
def test_the_transposed_factors_are_the_adjoint(shapes, side, seed):
    x, factors = given_operands(shapes, 3, side, seed)
    found = kl.kron_matmul(x, factors, side=side)
    y = torch.randn_like(found)
    back = kl.kron_matmul(y, [f.mT for f in factors], side=side)
    close((found * y).sum(), (x * back).sum())


@settings(max_examples=40)
@given(shapes, st.integers(0, 4), st.integers(1, 4), sides, seeds)
def test_a_factor_of_one_size_is_the_identity_beside_others(shapes, place, size, side, seed):
    """``F1 ⊗ I ⊗ F2`` changes blocks of x and nothing else; ``I_1`` changes nothing."""
    x, factors = given_operands(shapes, 3, side, seed)
    place = min(place, len(factors))
    one = [*factors[:place], torch.eye(1).double(), *factors[place:]]
    close(kl.kron_matmul(x, one, side=side), kl.kron_matmul(x, factors, side=side))
    with_identity = [*factors[:place], torch.eye(size).double(), *factors[place:]]
    wide = tuple(f.shape for f in with_identity)
    x, _ = operands(wide, 3, side)
    close(kl.kron_matmul(x, with_identity, side=side), product(x, with_identity, side))
    alone = [torch.eye(n).double() for n in (size, 3, size)]
    x, _ = operands(tuple(f.shape for f in alone), 3, side)
    assert torch.equal(kl.kron_matmul(x, alone, side=side), x)


@settings(max_examples=40)
@given(shapes, st.integers(0, 2), sides, seeds)
def test_merging_two_factors_changes_nothing(shapes, place, side, seed):
    x, factors = given_operands(((2, 3), *shapes), 3, side, seed)
    place = min(place, len(factors) - 2)
    both = torch.kron(*factors[place : place + 2])
    merged = [*factors[:place], both, *factors[place + 2 :]]
    close(kl.kron_matmul(x, merged, side=side), kl.kron_matmul(x, factors, side=side))


@settings(max_examples=40)
@given(shapes, st.integers(0, 3), sides, seeds)
def test_it_is_linear_in_each_operand(shapes, place, side, seed):
    x, factors = given_operands(shapes, 3, side, seed)
    place = min(place, len(factors) - 1)
    u, f = torch.randn_like(x), torch.randn_like(factors[place])

    def run(x, factor=factors[place]):
        given = [*factors[:place], factor, *factors[place + 1 :]]
        return kl.kron_matmul(x, given, side=side)

    whole = run(x)
    close(run(2 * x - 3 * u), 2 * whole - 3 * run(u))
    close(run(x, 2 * factors[place] - 3 * f), 2 * whole - 3 * run(x, f))


@settings(max_examples=30)
@given(shapes, shapes, sides, seeds)
def test_two_products_are_one_with_the_products_of_factors(first, second, side, seed):
    """``(A ⊗ B)(C ⊗ D) = AC ⊗ BD``."""
    torch.manual_seed(seed)
    sizes = [(a[0], a[1], b[1]) for a, b in zip(first, second, strict=False)]
    left = [randn(p, q) for p, q, _ in sizes]
    right = [randn(q, r) for _, q, r in sizes]
    both = [a @ b for a, b in zip(left, right, strict=True)]
    x, _ = operands(tuple(f.shape for f in both), 3, side)
    steps = (left, right) if side == "right" else (right, left)
    found = reduce(lambda x, factors: kl.kron_matmul(x, factors, side=side), steps, x)
    close(found, kl.kron_matmul(x, both, side=side))


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
