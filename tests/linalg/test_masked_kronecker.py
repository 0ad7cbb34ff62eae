"""Products and systems of Kronecker products on incomplete grids, against the dense matrix."""

import math
import warnings

import pytest
import torch

import kernlib
from kernlib.linalg.kronecker import kron_eigh, kron_solve
from kernlib.linalg.masked_kronecker import masked_kron_matmul, masked_kron_solve
from tests.linalg.kronecker_cases import (
    WIDE,
    check_derivatives,
    close,
    dense_solution,
    kron,
    shifted,
    spd,
    with_condition,
    with_gradient,
)

# Sizes of the factors, and the batch of each.
CASES = (
    ((3,), ((),)),
    ((1,), ((),)),
    ((2, 5), ((), ())),
    ((4, 1, 7), ((2,), (3, 1), ())),
    ((3, 2), ((0,), ())),
)


def observed(size, share=2 / 3):
    """Some entries of the grid, not sorted."""
    return torch.randperm(size)[: max(1, round(size * share))]


def part(matrix, rows, columns):
    return matrix[..., rows[:, None], columns]


def system(factors, index, noise):
    return shifted(part(kron(factors), index, index), noise)


# Products.


@pytest.mark.parametrize("case", CASES)
def test_products_on_a_part_of_the_grid(case, seed):
    factors = spd(case)
    matrix = kron(factors)
    size = matrix.shape[-1]
    for share in (0, 1 / 2, 1):
        rows, columns = observed(size, share), observed(size)
        for others in (None, columns):
            whole = part(matrix, rows, rows if others is None else others)
            for shape in ((), (3,), (0,)):
                x = torch.randn(whole.shape[-1], *shape, dtype=WIDE)
                close(masked_kron_matmul(x, factors, rows, others), whole @ x)


def test_products_with_rectangular_factors(seed):
    """As of a covariance between two grids."""
    factors = torch.randn(2, 3, dtype=WIDE), torch.randn(5, 4, 1, 7, dtype=WIDE)
    rows, columns = observed(2), observed(21)
    x = torch.randn(5, 4, 14, 2, dtype=WIDE)
    close(masked_kron_matmul(x, factors, rows, columns), part(kron(factors), rows, columns) @ x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_in_every_dtype(dtype, seed):
    factors, rows = [f.to(dtype) for f in spd(CASES[2])], observed(10)
    x = torch.randn(len(rows), 2, dtype=WIDE).to(dtype)
    wanted = part(kron([f.double() for f in factors]), rows, rows) @ x.double()
    found = masked_kron_matmul(x, factors, rows)
    assert found.dtype == dtype
    close(found.double(), wanted, 4 * torch.finfo(dtype).eps)


def test_derivatives_of_products(seed):
    rows, columns = torch.tensor([5, 0, 3]), torch.tensor([1, 4])
    inputs = torch.randn(2, dtype=WIDE), *spd(((2, 3), ((2,), ())))
    check_derivatives(lambda x, *f: masked_kron_matmul(x, f, rows, columns), *inputs)


def test_products_inside_vmap(seed):
    factors, rows = spd(CASES[2]), observed(10)
    x = torch.randn(3, len(rows), 2, dtype=WIDE)
    found = torch.vmap(lambda each: masked_kron_matmul(each, factors, rows))(x)
    close(found, masked_kron_matmul(x, factors, rows))


# Systems.


@pytest.mark.parametrize("case", CASES)
def test_solutions(case, seed):
    factors = spd(case)
    *batch, size, _ = kron(factors).shape
    index = observed(size)
    count = len(index)
    a_batch = torch.rand(batch, dtype=WIDE) + 0.1
    for noise in (0.3, torch.tensor(0.2, dtype=WIDE), a_batch):
        matrix = system(factors, index, noise)
        for shape in ((count,), (count, 3), (count, 0), (*batch, count), (2, *batch, count, 1)):
            b = torch.randn(shape, dtype=WIDE)
            found = masked_kron_solve(factors, b, index, noise=noise, tol=1e-12)
            wanted = dense_solution(matrix, b)
            close(found.x, wanted, 1e-9)
            vector = wanted.shape == (*batch, count)
            norms = wanted.norm(dim=-1 if vector else -2)
            assert found.residual.shape == norms.shape and found.residual.dtype == WIDE
            assert (found.residual <= 1e-12).all()
            assert type(found.iterations) is int


def test_nothing_observed(seed):
    none = torch.zeros(0, dtype=torch.int64)
    found = masked_kron_solve(spd(CASES[2]), torch.ones(0, 2, dtype=WIDE), none, noise=1.0)
    assert found.x.shape == (0, 2) and torch.equal(found.residual, torch.zeros(2, dtype=WIDE))


def test_everything_observed_is_the_product_itself(seed):
    factors, b = spd(CASES[2]), torch.randn(10, dtype=WIDE)
    found = masked_kron_solve(factors, b, torch.arange(10), noise=0.5, tol=1e-13)
    close(found.x, kron_solve(factors, b, noise=0.5))


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_preconditioner_sees_what_the_caller_does_and_saves_iterations(shape, seed):
    """That of the full grid, of which an entry in twenty is missing."""
    factors = [with_condition(n, 3) for n in (9, 11)]
    index, (values, vectors) = observed(99, 0.95), kron_eigh(factors)
    b, seen, noise = torch.randn(len(index), *shape, dtype=WIDE), set(), 1e-3
    scale = kron([values[0][:, None], values[1][:, None]]) + noise

    def full(v):
        seen.add(v.shape)
        columns = v if v.dim() == 2 else v[:, None]
        grid = v.new_zeros(99, columns.shape[1]).index_copy(0, index, columns)
        turned = kernlib.kron_matmul(grid, [q.mT for q in vectors], side="left") / scale
        return kernlib.kron_matmul(turned, vectors, side="left")[index].view(v.shape)

    options = {"noise": noise, "tol": 1e-8, "check_every": 1}
    plain = masked_kron_solve(factors, b, index, **options)
    better = masked_kron_solve(factors, b, index, preconditioner=full, **options)
    assert seen == {b.shape}
    assert better.iterations < plain.iterations / 2
    close(better.x, dense_solution(system(factors, index, noise), b), 1e-4)


def test_a_preconditioner_of_a_batch(seed):
    factors, index = spd(((2, 5), ((3,), ()))), observed(10)
    matrix, b = system(factors, index, 0.1), torch.randn(len(index), 2, dtype=WIDE)
    inverse = torch.linalg.inv(matrix)
    options = {"noise": 0.1, "check_every": 1}
    found = masked_kron_solve(factors, b, index, preconditioner=inverse.__matmul__, **options)
    assert found.iterations <= 3 and found.x.shape == (3, len(index), 2)
    with pytest.raises(ValueError, match=r"preconditioner must return .* \(3, 7, 2\), got shape"):
        masked_kron_solve(factors, b, index, preconditioner=lambda v: v[0], **options)


@pytest.mark.parametrize(("exponent", "tol"), [(1, 1e-6), (2, 1e-6), (4, 1e-4)])
def test_float32_reaches_what_is_documented(exponent, tol, seed):
    factors = [with_condition(n, exponent / 2) for n in (9, 14)]
    index = observed(126)
    b, noise = torch.randn(len(index)), 10.0**-exponent
    half = [f.float() for f in factors]
    found = masked_kron_solve(half, b, index, noise=noise, tol=tol, max_iter=4000)
    assert found.x.dtype == torch.float32 and found.residual <= tol
    whole = system([f.double() for f in half], index, noise)
    assert (whole @ found.x.double() - b).norm() <= 2 * tol * b.norm()


# Gradients of solutions.


@pytest.mark.few(1)
@pytest.mark.parametrize(("case", "shape"), [(((2, 2), ((), ())), ()), (CASES[0], (2,))])
def test_derivatives_of_solutions(case, shape, seed):
    """Identities too, whose eigenvalues are equal."""
    factors, noise = spd(case), torch.rand(shape, dtype=WIDE) + 0.5
    factors[0] = torch.eye(factors[0].shape[-1], dtype=WIDE)
    index = observed(math.prod(case[0]))
    options = {"tol": 0.0, "max_iter": 8, "check_every": 1}

    def call(b, noise, *factors):
        read = [(f + f.mT) / 2 for f in factors]  # the lower triangle alone, else
        return masked_kron_solve(read, b, index, noise=noise, **options).x

    check_derivatives(call, torch.randn(len(index), dtype=WIDE), noise, *factors)


def test_gradients_are_those_of_the_dense_system(seed):
    factors, index = spd(((4, 1, 7), ((2,), (3, 1), ()))), observed(28)
    b = torch.randn(len(index), 2, dtype=WIDE)
    inputs = with_gradient(torch.rand(2, dtype=WIDE) + 0.1, b, *factors)
    noise, b, *own = inputs
    found = masked_kron_solve(own, b, index, noise=noise, tol=1e-13).x
    wanted = dense_solution(system([(f + f.mT) / 2 for f in own], index, noise), b)
    weight = torch.randn_like(wanted)
    pairs = [torch.autograd.grad(each, inputs, weight) for each in (found, wanted)]
    for one, other in zip(*pairs, strict=True):
        close(one, other, 1e-8)


def test_what_has_not_converged_warns_also_for_gradients(seed):
    factors, index = with_gradient(*spd(CASES[2])), observed(10)
    b, options = torch.randn(len(index), dtype=WIDE), {"noise": 1e-3, "tol": 1e-12}
    warned = kernlib.ConvergenceWarning
    with pytest.warns(warned, match="^masked_kron_solve: .* above tol=1e-12 after 2 iter") as seen:
        x, residual, iterations = masked_kron_solve(factors, b, index, max_iter=2, **options)
    assert seen[0].filename == __file__
    assert iterations == 2 and residual > 1e-12 and not residual.requires_grad
    with pytest.warns(warned, match="^a gradient of masked_kron_solve: .* after 2 iterations"):
        torch.autograd.grad(x.square().sum(), factors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = masked_kron_solve(factors, b, index, **options).x
        torch.autograd.grad(x.square().sum(), factors)


def test_autocast_changes_nothing(seed):
    factors, index = with_gradient(*spd(CASES[2], torch.float32)), observed(10)
    b = torch.randn(len(index))

    def call(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            x = masked_kron_solve(factors, b, index, noise=0.5).x
            return x, *torch.autograd.grad(x.sum(), factors)

    assert all(torch.equal(*pair) for pair in zip(call(True), call(False), strict=True))


# Errors.


def test_which_indices_are_refused():
    factors, x, good = [torch.eye(3), torch.eye(2)], torch.ones(2), torch.tensor([0, 4])

    def as_rows(index):
        return masked_kron_matmul(x, factors, index)

    def as_columns(index):
        return masked_kron_matmul(x, factors, good, index)

    def as_index(index):
        return masked_kron_solve(factors, x, index, noise=1.0)

    for name, call in (("rows", as_rows), ("columns", as_columns), ("index", as_index)):
        with pytest.raises(TypeError, match=f"{name} must be int64, got torch.int32"):
            call(good.int())
        with pytest.raises(ValueError, match=rf"{name} must have one dimension, .* \(1, 2\)"):
            call(good[None])
        with pytest.raises(ValueError, match=f"{name} must be 0 to 5, .* got 6"):
            call(torch.tensor([6, 0]))
        with pytest.raises(ValueError, match=f"{name} must be 0 to 5, .* got -1"):
            call(torch.tensor([0, -1]))
        with pytest.raises(ValueError, match=f"{name} must hold no entry twice"):
            call(torch.tensor([4, 4]))
        with pytest.raises(ValueError, match=f"{name} must be on cpu"):
            call(good.to("meta"))


def test_what_else_products_refuse():
    factors, x, rows = [torch.eye(3), torch.eye(2)], torch.ones(2), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"x must be \(2,\) or \(..., 2, C\) .* got shape \(3,\)"):
        masked_kron_matmul(torch.ones(3), factors, rows)
    with pytest.raises(ValueError, match=r"x must be .* got shape \(\)"):
        masked_kron_matmul(torch.tensor(1.0), factors, rows)
    with pytest.raises(TypeError, match=r"x and factors\[0\] must have one dtype"):
        masked_kron_matmul(x.double(), factors, rows)
    with pytest.raises(ValueError, match=r"factors\[1\] must be a matrix"):
        masked_kron_matmul(x, [factors[0], torch.ones(2)], rows)
    with pytest.raises(ValueError, match=r"columns must be given .* 3 by 2"):
        masked_kron_matmul(x, [torch.ones(3, 2)], rows)


def test_what_else_systems_refuse():
    factors, b, index = [torch.eye(3), torch.eye(2)], torch.ones(2), torch.tensor([0, 4])
    with pytest.raises(
        ValueError, match=r"b must be \(2,\) or \(\.\.\., 2, C\) for .* got shape \(6,\)"
    ):
        masked_kron_solve(factors, torch.ones(6), index, noise=1.0)
    with pytest.raises(ValueError, match="noise must be 0 or greater"):
        masked_kron_solve(factors, b, index, noise=-1.0)
    with pytest.raises(ValueError, match=r"factors\[0\] must be square"):
        masked_kron_solve([torch.ones(3, 2)], b, index, noise=1.0)
    with pytest.raises(ValueError, match="max_iter must be 0 or greater"):
        masked_kron_solve(factors, b, index, noise=1.0, max_iter=-1)
    with pytest.raises(TypeError, match="preconditioner must be a function"):
        masked_kron_solve(factors, b, index, noise=1.0, preconditioner=torch.eye(2))
    with pytest.raises(RuntimeError, match="b is inside a transform"):
        torch.vmap(lambda b: masked_kron_solve(factors, b, index, noise=1.0).x)(torch.ones(3, 2))
    nowhere = [f.to("meta") for f in factors], b.to("meta"), index.to("meta")
    with pytest.raises(ValueError, match="b must have values"):
        masked_kron_solve(*nowhere, noise=1.0)
