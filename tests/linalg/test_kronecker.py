"""Factorisations, solutions and determinants of Kronecker products, against the dense matrix."""

import math

import pytest
import torch

from kernlib.linalg import kronecker
from kernlib.linalg.kronecker import (
    kron_cholesky,
    kron_eigh,
    kron_inverse,
    kron_logdet,
    kron_solve,
)
from kernlib.linalg.masked_kronecker import masked_kron_solve
from tests.linalg.cases import positive
from tests.linalg.kronecker_cases import (
    WIDE,
    close,
    dense_solution,
    kron,
    shifted,
    spd,
    square,
    with_condition,
    with_gradient,
)

# Sizes of the factors, and the batch of each.
CASES = (
    ((3,), ((),)),
    ((1,), ((),)),
    ((2, 5), ((), ())),
    ((1, 1), ((), (2,))),
    ((4, 1, 7), ((2,), (3, 1), ())),
    ((2, 3), ((2,), (3, 1))),
    ((3, 2), ((0,), ())),
)


def right_sides(matrix):
    """A vector, columns, none, a vector for each of the batch, and a batch that broadcasts."""
    *batch, n, _ = matrix.shape
    shapes = {(n,), (n, 3), (n, 0), (*batch, n), (*batch, n, 2), (2, *(1 for _ in batch), n, 1)}
    return [torch.randn(shape, dtype=WIDE) for shape in sorted(shapes)]


# Values.


@pytest.mark.parametrize("case", CASES)
def test_factorisations(case, seed):
    factors = spd(case)
    matrix = kron(factors)
    lower = kron_cholesky(factors)
    assert all(torch.equal(f.tril(), f) for f in lower)
    close(kron(lower) @ kron(lower).mT, matrix)
    general = square(case)
    inverse = kron(kron_inverse(general))
    close(inverse, torch.linalg.inv(kron(general)))
    found = kron_eigh(factors)
    assert [w.shape for w in found.values] == [f.shape[:-1] for f in factors]
    vectors, w = kron(found.vectors), found.eigenvalues()
    assert w.shape == matrix.shape[:-1]
    close(vectors * w[..., None, :] @ vectors.mT, matrix)
    assert all((values.diff() >= 0).all() for values in found.values)


@pytest.mark.parametrize("case", CASES)
def test_solutions_without_noise(case, seed):
    for factors, cholesky in ((square(case), False), (spd(case), True), (spd(case), False)):
        matrix = kron(factors)
        for b in right_sides(matrix):
            close(kron_solve(factors, b, cholesky=cholesky), dense_solution(matrix, b), 1e-8)


@pytest.mark.parametrize("case", CASES)
def test_solutions_with_noise(case, seed):
    factors = spd(case)
    matrix = kron(factors)
    a_batch = torch.rand(matrix.shape[:-2], dtype=WIDE)
    for noise in (0, 0.3, torch.tensor(0.2, dtype=WIDE), a_batch):
        whole = shifted(kron(factors), noise)
        for b in right_sides(matrix):
            close(kron_solve(factors, b, noise=noise), dense_solution(whole, b))
        close(kron_logdet(factors, noise=noise), torch.logdet(whole))


def test_a_batch_of_noise_alone_is_one_of_the_result(seed):
    factors, noise = spd(CASES[2]), torch.rand(3, dtype=WIDE)
    whole, b = shifted(kron(factors), noise), torch.randn(10, dtype=WIDE)
    close(kron_solve(factors, b, noise=noise), dense_solution(whole, b))
    each = torch.randn(3, 10, dtype=WIDE)
    close(kron_solve(factors, each, noise=noise), dense_solution(whole, each))
    close(kron_logdet(factors, noise=noise), torch.logdet(whole))


@pytest.mark.parametrize("case", CASES)
def test_determinants_without_noise(case, seed):
    factors = spd(case)
    close(kron_logdet(factors), torch.logdet(kron(factors)))


def test_signs_of_determinants(seed):
    """That of a factor stands to the power of the other sizes."""
    odd, even = spd(((3, 5), ((), ()))), spd(((3, 2), ((), ())))
    odd[0][:, 0] *= -1
    even[0][:, 0] *= -1
    assert kron_logdet(odd).isnan() and torch.logdet(kron(odd)).isnan()
    close(kron_logdet(even), torch.logdet(kron(even)))
    odd[0][:] = 0
    assert kron_logdet(odd) == -math.inf


def test_a_determinant_of_0_has_no_sign(seed):
    """Whatever the other factors' determinants are."""
    zero = torch.diag(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))
    negative = torch.diag(torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64))
    for factors in ([zero, negative], [negative, zero], [negative, negative, zero]):
        assert torch.logdet(kron(factors)) == kron_logdet(factors) == -math.inf
    batch = [torch.stack((zero, negative)), torch.stack((negative, zero + 3))]
    found = kron_logdet(batch)
    assert found[0] == -math.inf and found[1].isnan()


def test_many_factors(seed):
    factors = [positive(1, 1, dtype=WIDE) for _ in range(65)]
    b = torch.randn(1, dtype=WIDE)
    matrix = kron(factors)
    close(kron_solve(factors, b), b / matrix[0])
    close(kron_solve(factors, b, noise=0.5), b / (matrix[0] + 0.5))
    close(kron_logdet(factors, noise=0.5), (matrix[0, 0] + 0.5).log())


def test_strided_and_shared_factors(seed):
    f = positive(3, 6, 6, dtype=WIDE)[:, ::2, ::2].mT
    b = torch.randn(2, 9, dtype=WIDE).mT
    close(kron_solve([f, f], b), dense_solution(kron([f, f]), b))
    whole = shifted(kron([f, f]), torch.tensor(0.1, dtype=WIDE))
    close(kron_solve([f, f], b, noise=0.1), dense_solution(whole, b))


@pytest.mark.parametrize("other", ["zeros", "nan", "anything"])
def test_of_symmetric_factors_the_lower_triangle_is_read(other, seed):
    """Values, gradients and second derivatives are those of the symmetric matrix, and symmetric."""
    whole, b = spd(((3, 2), ((2,), ()))), torch.randn(6, dtype=WIDE)
    fill = {"zeros": 0.0, "nan": math.nan, "anything": 7.0}[other]
    halves = [torch.where(torch.ones_like(f).tril() > 0, f, fill) for f in whole]
    index = torch.tensor([4, 0, 1])
    for call in (
        kron_cholesky,
        lambda f: [kron_solve(f, b, cholesky=True)],
        lambda f: [kron_solve(f, b, noise=0.5)],
        lambda f: [kron_logdet(f, noise=0.5)],
        lambda f: kron_eigh(f).values,
        lambda f: [masked_kron_solve(f, b[index], index, noise=0.5, tol=1e-13).x],
    ):
        pairs = []
        for factors in (whole, halves):
            leaves = with_gradient(*factors)
            results = call(leaves)
            loss = sum((x.square() * torch.arange(1.0, 1 + x.shape[-1])).sum() for x in results)
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
            assert all(torch.allclose(g, g.mT) for g in (*grads, *second))
            pairs.append((*results, *grads, *second))
        for one, other in zip(*pairs, strict=True):
            close(other, one, 1e-8)


# Accuracy.


@pytest.mark.parametrize("exponent", [1, 2, 4, 6])
@pytest.mark.parametrize("way", ["lu", "cholesky", "noise"])
def test_float32_is_as_accurate_as_documented(exponent, way, seed):
    """For b of which x is large, as most are."""
    noise = 10.0**-exponent if way == "noise" else None
    for sizes in ((33,), (9, 13), (4, 1, 7)):
        count = sum(n > 1 for n in sizes)
        factors = [with_condition(n, exponent / count).float() for n in sizes]
        b = torch.randn(math.prod(sizes), 2)
        x = kron_solve(factors, b, noise=noise, cholesky=way == "cholesky").double()
        wide = [f.double() for f in factors]
        matrix = shifted(kron(wide), noise or 0.0)
        exact = torch.linalg.solve(matrix, b.double())
        forward, backward = (5e-7, 1e-6) if noise else (1e-7, 1e-7)
        assert (x - exact).norm() <= forward * 10**exponent * exact.norm()
        size = torch.linalg.matrix_norm(matrix, 2) * x.norm() + b.norm()
        assert (matrix @ x - b).norm() <= backward * size
        wanted = kron_logdet(wide, noise=noise)
        scale = torch.linalg.eigvalsh(matrix).log().abs().sum()
        error = abs(kron_logdet(factors, noise=noise).double() - wanted)
        assert error <= {1: 1e-6, 2: 1e-6, 4: 4e-6, 6: 3e-4}[exponent] * scale


def test_ill_conditioned_factors_in_float64(seed):
    factors = [with_condition(n, 5) for n in (7, 12)]  # conditions of 1e10 together
    b = torch.randn(84, 2, dtype=WIDE)
    matrix = kron(factors)
    for options in ({}, {"cholesky": True}, {"noise": 0.0}):
        x = kron_solve(factors, b, **options)
        assert (matrix @ x - b).norm() <= 1e-14 * (matrix.norm() * x.norm() + b.norm())
    wanted = dense_solution(shifted(matrix, 1e-8), b)
    close(kron_solve(factors, b, noise=1e-8), wanted, 1e-6)


def test_where_torch_may_round_float32_is_factored_in_float64_gradients_too(seed, monkeypatch):
    """TF32 has too few digits. Only results and gradients are rounded, once."""
    monkeypatch.setattr(kronecker, "rounds_gradients", lambda t: t.dtype is torch.float32)
    b = torch.randn(2, 120, 2)
    for call in (
        lambda f: [kron_solve(f, b.to(f[0]))],
        lambda f: [kron_solve(f, b.to(f[0]), cholesky=True)],
        kron_inverse,
        kron_cholesky,
        lambda f: [kron_logdet(f)],
    ):
        ours = with_gradient(*spd(((40, 3), ((2,), ())), torch.float32))
        exact = with_gradient(*(f.double() for f in ours))
        results, wanted = call(ours), call(exact)
        along = [torch.randn_like(each) for each in results]
        results += torch.autograd.grad(results, ours, along)
        wanted += torch.autograd.grad(wanted, exact, [each.double() for each in along])
        for one, other in zip(results, wanted, strict=True):
            assert one.dtype is torch.float32
            assert (one - other).norm() <= 2e-7 * other.norm()


# Failures.


def test_what_cannot_be_factored_is_nan_in_its_entry_alone(seed):
    first, second = spd(((3, 2), ((2,), ())))
    first[1] = 0
    b = torch.randn(6, dtype=WIDE)
    for x in (
        kron_solve([first, second], b),
        kron_solve([first, second], b, cholesky=True),
        *kron_cholesky([first, second])[:1],
        *kron_inverse([first, second])[:1],
    ):
        assert x[0].isfinite().all() and x[1].isnan().any()
    first[1] = torch.nan
    assert kron_solve([first, second], b, noise=1.0).isnan().any(-1).tolist() == [False, True]
    assert kron_logdet([first, second], noise=1.0).isnan().tolist() == [False, True]
    assert kron_eigh([second, first]).eigenvalues()[1].isnan().all()


def reading_nan_as_0(compute):
    return lambda matrix, *rest: compute(matrix.nan_to_num(), *rest)


@pytest.mark.few(100)
@pytest.mark.parametrize("ignored", [False, True])
def test_nan_in_a_factor_is_nan_and_an_error_in_its_entry(ignored, seed, monkeypatch):
    """As well where LU reads it as 0, as cuSOLVER's does."""
    b = torch.randn(6, dtype=WIDE)
    if ignored:
        for name in ("inv_ex", "solve_ex", "slogdet"):
            wrapped = reading_nan_as_0(getattr(torch.linalg, name))
            monkeypatch.setattr(torch.linalg, name, wrapped)
    calls = [
        lambda f, **options: kron_solve(f, b, **options),
        lambda f, **options: kron_inverse(f, **options)[1],
        kron_logdet,
        lambda f, **options: kron_solve(f, b, cholesky=True, **options),
        lambda f, **options: kron_cholesky(f, **options)[1],
    ]
    for row, column in ((0, 0), (1, 1), (1, 0), (0, 1)):
        first, second = spd(((3, 2), ((), (2,))))
        second[1, row, column] = torch.nan
        for call in calls if row >= column else calls[:3]:
            (leaf,) = with_gradient(second)
            found = call([first, leaf]).reshape(2, -1)
            assert found.isnan().any(-1).tolist() == [False, True]
            (grad,) = torch.autograd.grad(found[1].sum(), leaf)
            assert grad[1].isnan().any() and grad[0].isfinite().all()
            said = r"factors\[1\]: batch entry 1: it (holds NaN|is not positive definite)"
            with pytest.raises(torch.linalg.LinAlgError, match=said):
                call([first, second], check_errors=True)


def test_nan_of_a_failure_reaches_gradients(seed):
    (f,) = with_gradient(torch.zeros(2, 2, dtype=WIDE))
    (found,) = torch.autograd.grad(kron_solve([f, f], torch.ones(4, dtype=WIDE)).sum(), f)
    assert not found.isfinite().any()


def test_errors_that_are_checked_name_factor_and_entry(seed):
    first, second = spd(((3, 2), ((2,), ())))
    bad = first.clone()
    bad[1] = 0
    b, error = torch.randn(6, dtype=WIDE), torch.linalg.LinAlgError
    with pytest.raises(error, match=r"kron_solve: factors\[1\]: batch entry 1: it is singular"):
        kron_solve([second, bad], b, check_errors=True)
    with pytest.raises(error, match=r"factors\[1\]: batch entry 1: it is not positive definite"):
        kron_solve([second, bad], b, cholesky=True, check_errors=True)
    with pytest.raises(error, match=r"kron_cholesky: factors\[0\]: batch entry 1: it is not pos"):
        kron_cholesky([bad, second], check_errors=True)
    with pytest.raises(error, match=r"kron_inverse: factors\[0\]: batch entry 1"):
        kron_inverse([bad, second], check_errors=True)
    with pytest.raises(error, match=r"kron_logdet: factors\[0\]: batch entry 1: its determinant"):
        kron_logdet([bad, second], check_errors=True)
    bad[1] = torch.nan
    for call in (kron_eigh, lambda f, **kw: kron_logdet(f, noise=1.0, **kw)):
        with pytest.raises(error, match=r"factors\[0\]: batch entry 1: its eigenvalues did not"):
            call([bad, second], check_errors=True)
    kron_solve([first, second], b, noise=1.0, check_errors=True)


@pytest.mark.parametrize("call", [kron_cholesky, kron_inverse, kron_eigh, kron_logdet])
def test_which_factors_are_refused(call):
    eye = torch.eye(3)
    with pytest.raises(TypeError, match="factors must be a list or tuple"):
        call(eye)
    with pytest.raises(ValueError, match="factors must hold at least one"):
        call([])
    with pytest.raises(ValueError, match=r"factors\[1\] must be square, .* got shape \(3, 2\)"):
        call([eye, torch.ones(3, 2)])
    with pytest.raises(ValueError, match=r"factors\[0\] must have sizes above 0"):
        call([torch.ones(0, 0)])
    with pytest.raises(TypeError, match=r"factors\[0\] and factors\[1\] must have one dtype"):
        call([eye, eye.double()])
    with pytest.raises(RuntimeError, match=r"factors\[0\] is inside a transform"):
        torch.vmap(lambda f: call([f]))(torch.ones(2, 3, 3))


def test_what_else_is_refused():
    factors, b = [torch.eye(3), torch.eye(2)], torch.ones(6)
    with pytest.raises(
        ValueError, match=r"b must be \(6,\) or \(\.\.\., 6, C\) for .* got shape \(5,\)"
    ):
        kron_solve(factors, torch.ones(5))
    with pytest.raises(
        ValueError, match=r"b must be \(6,\) or \(\.\.\., 6, C\) for .* got shape \(3, 6\)"
    ):
        kron_solve(factors, torch.ones(3, 6))
    with pytest.raises(TypeError, match="b must have one dtype"):
        kron_solve(factors, b.double())
    wide = torch.eye(3).expand(2, 3, 3)
    with pytest.raises(ValueError, match="the batches of factors"):
        kron_solve([wide, torch.eye(2).expand(3, 2, 2)], b)
    with pytest.raises(ValueError, match=r"b of shape \(3, 6, 1\) does not broadcast"):
        kron_solve([wide, factors[1]], torch.ones(3, 6, 1))
    with pytest.raises(ValueError, match="omit it"):
        kron_solve(factors, b, noise=1.0, cholesky=True)


@pytest.mark.parametrize("call", [lambda f, s: kron_solve(f, torch.ones(3), noise=s),
                                  lambda f, s: kron_logdet(f, noise=s)])  # fmt: skip
def test_which_noise_is_refused(call):
    factors = [torch.eye(3)]
    for wrong in (-1.0, math.nan, math.inf, torch.tensor([0.5, -1.0]), torch.tensor(math.nan)):
        with pytest.raises(ValueError, match="noise must be 0 or greater and finite"):
            call(factors, wrong)
    with pytest.raises(ValueError, match=r"noise must fit torch\.float32"):
        call(factors, 1e300)
    with pytest.raises(TypeError, match=r"noise must be torch\.float32 as factors"):
        call(factors, torch.tensor(0.5, dtype=WIDE))
    with pytest.raises(ValueError, match=r"factors \(2,\) and noise \(3,\) do not broadcast"):
        call([torch.eye(3).expand(2, 3, 3)], torch.ones(3))
