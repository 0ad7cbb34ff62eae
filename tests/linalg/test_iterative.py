"""Conjugate gradients, the Nyström preconditioner, and kernel systems solved with both."""

import warnings

import pytest
import torch

import kernlib
from kernlib import linalg
from tests.support.defaults import SURROUNDINGS
from tests.support.speeds import slow_but


@pytest.fixture
def points(seed):
    return torch.randn(600, 3, dtype=torch.float64)


def spread_out(n, condition, dtype):
    """A positive definite matrix with eigenvalues from 1 to ``condition``."""
    turn = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    return ((turn * torch.logspace(0, condition, n, dtype=torch.float64)) @ turn.mT).to(dtype)


def relative(a, x, b):
    return (a.double() @ x.double() - b.double()).norm(dim=0) / b.double().norm(dim=0)


@pytest.mark.parametrize("shape", [(200,), (200, 1), (200, 5)])
@pytest.mark.parametrize("start", [False, True])
def test_residual_is_the_true_one_and_below_tol(shape, start, seed):
    a, b = spread_out(200, 2, torch.float64), torch.randn(shape, dtype=torch.float64)
    x0 = torch.randn_like(b) if start else None
    x, residual, iterations = linalg.conjugate_gradient(a.__matmul__, b, x0=x0, tol=1e-10)
    assert x.shape == shape and residual.shape == shape[1:]
    assert (residual <= 1e-10).all() and 0 < iterations <= 300
    assert torch.allclose(residual, relative(a, x, b), rtol=1e-3)


def test_columns_converge_alone(seed):
    """Each column takes the steps that it takes without the others."""
    a = spread_out(100, 3, torch.float64)
    b = torch.randn(100, 3, dtype=torch.float64)
    b[:, 1] = a @ torch.ones(100, dtype=torch.float64) * 1e-8
    b[:, 2] = 0
    together = linalg.conjugate_gradient(a.__matmul__, b, tol=1e-8, check_every=1)
    for column in range(3):
        alone = linalg.conjugate_gradient(a.__matmul__, b[:, column], tol=1e-8, check_every=1)
        difference = (together.x[:, column] - alone.x).norm()
        assert difference <= 1e-4 * alone.x.norm()  # condition times tol is 1e-5
        # One column is another product to BLAS, whose rounding is worth a few iterations.
        assert alone.iterations <= 1.2 * together.iterations
    assert (together.residual <= 1e-8).all()
    assert torch.equal(together.x[:, 2], torch.zeros(100, dtype=torch.float64))
    assert together.residual[2] == 0


def test_drift_of_float32_is_found(seed):
    """The recurrence says 1e-7 long before the residual does, if it ever does."""
    a = spread_out(300, 4, torch.float32)
    b = torch.randn(300, 2)
    found = linalg.conjugate_gradient(a.__matmul__, b, tol=1e-7, max_iter=5000)
    assert torch.allclose(found.residual, relative(a, found.x, b), rtol=0.5)
    assert (found.residual < 1e-3).all() and found.iterations < 5000
    easy = linalg.conjugate_gradient(a.__matmul__, b, tol=2e-3, max_iter=5000)
    assert (easy.residual <= 2e-3).all()


def test_columns_that_start_again_end_below_the_limit():
    """By the drift of float32 most columns start again, and would end beside it."""
    torch.manual_seed(3)
    a, b = spread_out(100, 3, torch.float32), torch.randn(100, 128)
    found = linalg.conjugate_gradient(a.__matmul__, b, tol=4e-5, max_iter=5000)
    assert (found.residual <= 4e-5).all()


def test_a_direction_without_curvature_stops_its_column(seed):
    a = torch.diag(torch.tensor([1.0, -1.0, 2.0, 3.0]))
    b = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    x, residual, _ = linalg.conjugate_gradient(a.__matmul__, b, tol=1e-6)
    assert residual[0] <= 1e-6 and residual[1] == 1
    assert torch.equal(x[:, 1], torch.zeros(4))


def test_iterations_end(seed):
    a, b = spread_out(200, 6, torch.float64), torch.randn(200, dtype=torch.float64)
    found = linalg.conjugate_gradient(a.__matmul__, b, max_iter=7, check_every=5)
    assert found.iterations == 7 and found.residual > 1e-6
    none = linalg.conjugate_gradient(a.__matmul__, b, max_iter=0)
    assert none.iterations == 0 and none.residual == 1


def test_a_good_preconditioner_saves_iterations(seed):
    a, b = spread_out(200, 5, torch.float64), torch.randn(200, 2, dtype=torch.float64)
    inverse = torch.linalg.inv(a)
    plain = linalg.conjugate_gradient(a.__matmul__, b, max_iter=5000)
    better = linalg.conjugate_gradient(
        a.__matmul__, b, preconditioner=inverse.__matmul__, check_every=1
    )
    assert better.iterations <= 3 < plain.iterations
    assert (better.residual <= 1e-6).all()


def test_what_conjugate_gradient_refuses():
    b, same = torch.ones(4), torch.clone
    with pytest.raises(ValueError, match=r"b must be \(N,\)"):
        linalg.conjugate_gradient(same, b[None, None])
    with pytest.raises(ValueError, match="x0 must have b's shape"):
        linalg.conjugate_gradient(same, b, x0=torch.ones(3))
    with pytest.raises(ValueError, match="tol must be 0"):
        linalg.conjugate_gradient(same, b, tol=float("nan"))
    with pytest.raises(ValueError, match=r"tol must have shape \(\), got \(4,\)"):
        linalg.conjugate_gradient(same, b, tol=torch.ones(4))
    with pytest.raises(ValueError, match="check_every must be 1"):
        linalg.conjugate_gradient(same, b, check_every=0)
    with pytest.raises(TypeError, match=r"matmul must be a function of v, such as A\.__matmul__"):
        linalg.conjugate_gradient(torch.eye(4), b)
    with pytest.raises(TypeError, match="preconditioner must be a function of v"):
        linalg.conjugate_gradient(same, b, preconditioner=torch.eye(4))
    for result in (lambda v: v[:1], lambda v: None):  # the first would broadcast
        with pytest.raises(ValueError, match=r"preconditioner must return a tensor of shape \(4,"):
            linalg.conjugate_gradient(same, b, preconditioner=result)
    with pytest.raises(TypeError, match=r"preconditioner must return torch\.float32"):
        linalg.conjugate_gradient(same, b, preconditioner=torch.Tensor.double)
    with pytest.raises(RuntimeError, match=r"b is inside a transform of torch\.func"):
        torch.vmap(lambda v: linalg.conjugate_gradient(same, v).x)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="matmul must return a tensor of shape"):
        linalg.conjugate_gradient(lambda v: v[:2], b)
    with pytest.raises(TypeError, match=r"matmul must return torch\.float32"):
        linalg.conjugate_gradient(torch.Tensor.double, b)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        linalg.conjugate_gradient(same, b.clone().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [False, True])
def test_magnitudes_do_not_matter(dtype, start, seed):
    """Of both ends of the range, where squares overflow or vanish; a column of 0 stays 0."""
    ends = (1e-36, 1e36) if dtype is torch.float32 else (1e-300, 1e300)
    factors = torch.tensor([1.0, *ends, 0.0], dtype=torch.float64)
    a, b = spread_out(50, 1, dtype), torch.randn(50, 1, dtype=torch.float64) * factors
    x0 = b.to(dtype) * 0.01 if start else None
    found = linalg.conjugate_gradient(a.__matmul__, b.to(dtype), x0=x0)
    assert (found.residual <= 1e-6).all()
    for column in range(3):
        x = found.x[:, column].double() / factors[column]
        torch.testing.assert_close(x, found.x[:, 0].double(), rtol=1e-4, atol=1e-6)
    assert not found.x[:, 3].any()


def test_autocast_does_not_round_the_preconditioner(points):
    inverse = linalg.nystrom(
        kernlib.gaussian(), points.float(), 20, regularization=1.0, bandwidth=2.0
    )
    for v in (torch.randn(600), torch.randn(600, 3)):
        with torch.autocast("cpu", torch.bfloat16):
            found = inverse(v)
        assert torch.equal(found, inverse(v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 40, 600])
def test_nystrom_is_its_formula(points, dtype, rank):
    x, regularization = points.to(dtype), 1e-2
    gaussian = kernlib.gaussian(symmetric=True)
    made = linalg.nystrom(gaussian, x, rank, regularization=regularization, bandwidth=2.0)
    assert made.vectors.shape == (600, rank) and made.vectors.dtype == dtype
    u, e = made.vectors.double(), made.eigenvalues
    kept = e > 0
    u, e = u[:, kept], e[kept]
    eye = torch.eye(len(e), dtype=torch.float64)
    assert (u.mT @ u - eye).abs().max() < 1e-5
    v = torch.randn(600, 3, dtype=dtype)
    inside = u.mT @ v.double()
    scaled = ((e.min() + regularization) / (e + regularization))[:, None] * inside
    wanted = u @ scaled + v.double() - u @ inside
    assert torch.allclose(made(v).double(), wanted, atol=1e-5)
    assert torch.allclose(made(v[:, 0]), made(v)[:, 0], atol=1e-5)


def test_nystrom_of_every_column_finds_the_eigenvalues(points):
    k = kernlib.run_kernel(kernlib.gaussian(), points, points, bandwidth=2.0)
    made = linalg.nystrom(kernlib.gaussian(), points, 600, regularization=1e-3, bandwidth=2.0)
    exact = torch.linalg.eigvalsh(k)
    assert torch.allclose(made.eigenvalues[-100:], exact[-100:], rtol=1e-6)


def test_the_generator_draws_the_columns(points):
    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        return linalg.nystrom(
            kernlib.laplace_l1(), points, 20, regularization=1.0, generator=generator, bandwidth=5.0
        ).vectors

    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))


def test_duplicates_do_no_harm(points):
    x = points[:100].repeat(6, 1)
    made = linalg.nystrom(kernlib.gaussian(), x, 300, regularization=1e-2, bandwidth=2.0)
    assert all(part.isfinite().all() for part in made)
    assert (made.eigenvalues > 0).sum() <= 100


def test_what_nystrom_refuses(points):
    gaussian, arguments = kernlib.gaussian(), {"regularization": 1.0, "bandwidth": 1.0}
    with pytest.raises(ValueError, match=r"rank must be 1 to 600.* got 601"):
        linalg.nystrom(gaussian, points, 601, **arguments)
    with pytest.raises(ValueError, match="regularization must be greater than 0"):
        linalg.nystrom(gaussian, points, 5, regularization=0, bandwidth=1.0)
    with pytest.raises(ValueError, match=r"x must be \(N, D\)"):
        linalg.nystrom(gaussian, points[None], 5, **arguments)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive semidefinite"):
        linalg.nystrom(kernlib.l1_distance(), points, 50, regularization=1.0)


@pytest.mark.parametrize("rank", [0, None, 100])
@pytest.mark.parametrize("shape", [(600,), (600, 2)])
def test_solve_kernel(points, rank, shape, product):
    y = torch.randn(shape, dtype=torch.float64)
    gaussian = kernlib.gaussian(symmetric=True)
    w, residual, _ = linalg.solve_kernel(
        gaussian, points, y, regularization=1e-2, rank=rank, tol=1e-8, bandwidth=1.0
    )
    k = kernlib.run_kernel(kernlib.gaussian(), points, points, bandwidth=1.0)
    k.diagonal().add_(1e-2)
    assert w.shape == shape and residual.shape == shape[1:] and (residual <= 1e-8).all()
    assert (relative(k, w, y) <= 2e-8).all()


def test_nystrom_saves_iterations(points, product):
    y = torch.randn(600, dtype=torch.float64)
    counts = [
        linalg.solve_kernel(
            kernlib.gaussian(), points, y, regularization=1e-3, rank=rank, bandwidth=2.0
        ).iterations
        for rank in (0, 200)
    ]
    assert counts[1] * 4 < counts[0]


def test_what_solve_kernel_refuses(points):
    for y, error in ((points[:5], ValueError), (points.float(), TypeError), ([1], TypeError)):
        with pytest.raises(error, match="y must be"):
            linalg.solve_kernel(kernlib.gaussian(), points, y, regularization=1.0, bandwidth=1.0)


def test_nothing_is_silently_detached(points):
    x, y = points[:20], torch.ones(20, dtype=torch.float64)
    bandwidth = torch.tensor(2.0, dtype=torch.float64)
    for name in ("x", "y", "bandwidth"):
        given = {"x": x, "y": y, "bandwidth": bandwidth}
        given[name] = given[name].clone().requires_grad_()
        solve = lambda x, y, **rest: linalg.solve_kernel(  # noqa: E731
            kernlib.gaussian(), x, y, regularization=1.0, **rest
        )
        with pytest.raises(RuntimeError, match=f"{name} requires a gradient, which solve_kernel"):
            solve(**given)
        with torch.no_grad():
            assert solve(**given).residual <= 1e-6
        if name != "y":
            del given["y"]
            with pytest.raises(RuntimeError, match=f"{name} requires a gradient, which nystrom"):
                linalg.nystrom(kernlib.gaussian(), rank=5, regularization=1.0, **given)


REFUSED = {
    "a batch": ({"bandwidth": torch.ones(3)}, ValueError, "bandwidth must be one number here"),
    "out": ({"out": torch.ones(20)}, TypeError, "out is no argument of"),
    "accumulate": ({"accumulate": True}, TypeError, "accumulate is no argument of"),
    "generator": ({"generator": 0}, TypeError, "generator must be a torch.Generator, got 0"),
    "maps": ({"feature_map": torch.ones(2, 1, 3)}, ValueError, "feature_map must give one matrix"),
    "no map": ({"feature_map": 2.0}, TypeError, "feature_map must be a tensor, got float"),
    "one length": ({"lengthscale": 2.0}, TypeError, "lengthscale must be a tensor with a value"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("task", ["solve_kernel", "nystrom"])
def test_what_both_refuse(task, case, points):
    given, error, message = REFUSED[case]
    arguments = (points[:20], torch.ones(20, dtype=torch.float64) if task[0] == "s" else 5)
    given = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(error, match=message):
        getattr(linalg, task)(
            kernlib.gaussian(), *arguments, regularization=1.0, **{"bandwidth": 1.0} | given
        )


@pytest.mark.parametrize("name", ["feature_map", "lengthscale"])
def test_a_map_of_another_dtype_is_refused(name, points):
    x, given = points[:20].float(), {name: torch.ones(3, dtype=torch.float64)}
    with pytest.raises(TypeError, match=f"{name} must be torch.float32 for torch.float32 inputs"):
        linalg.solve_kernel(
            kernlib.gaussian(), x, x[:, 0], regularization=1.0, bandwidth=1.0, **given
        )


def test_hyperparameters_of_one_number_and_maps_are_taken(points):
    x, y = points[:50], torch.randn(50, dtype=torch.float64)
    values = {"bandwidth": torch.tensor([2.0]), "feature_map": torch.rand(3, 2).double()}
    found = linalg.solve_kernel(kernlib.gaussian(), x, y, regularization=0.5, **values)
    k = kernlib.run_kernel(kernlib.gaussian(), x, x, **values)
    torch.testing.assert_close(k @ found.x + 0.5 * found.x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("shape", ((300,), (300, 4), (0,), (1, 2)), ids=str)
def test_few_points_on_a_cpu_are_solved_by_a_factor(dtype, shape, seed):
    x, y = torch.randn(shape[0], 3, dtype=dtype), torch.randn(shape, dtype=dtype)
    numbers = {"regularization": 1.0, "bandwidth": 1.0}
    found = linalg.solve_kernel(kernlib.matern52(), x, y, **numbers)
    assert found.iterations == 0 and (found.residual <= 1e-6).all()
    assert (found.x.shape, found.x.dtype, found.residual.shape) == (shape, dtype, shape[1:])
    k = kernlib.run_kernel(kernlib.matern52(), x.double(), x.double(), bandwidth=1.0)
    k.diagonal().add_(1.0)
    exact = torch.linalg.solve(k, y.double())
    torch.testing.assert_close(found.x.double(), exact, rtol=1e-4, atol=1e-4)
    if shape == (300,):
        iterated = linalg.solve_kernel(kernlib.matern52(), x, y, rank=0, tol=1e-5, **numbers)
        torch.testing.assert_close(found.x, iterated.x, rtol=1e-2, atol=1e-2)


def test_a_kernel_without_a_factor_is_left_to_the_preconditioner(points):
    y = torch.randn(50, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError, match="not positive semidefinite"):
        linalg.solve_kernel(kernlib.l1_distance(), points[:50], y, regularization=1e-3)
    with pytest.raises(torch.linalg.LinAlgError, match="kernel matrix holds NaN"):
        linalg.solve_kernel(kernlib.dot_product(), points[:50] * 1e200, y, regularization=1.0)


@pytest.fixture
def product(monkeypatch):
    """kernel_matmul of one matrix, made once: the reference would make it in every product."""
    made = {}

    def matmul(descriptor, a, b, v, **hyperparameters):
        if not made:
            made["k"] = kernlib.run_kernel(descriptor, a, b, **hyperparameters)
        return made["k"] @ v

    monkeypatch.setattr(kernlib, "kernel_matmul", matmul, raising=False)


# What a result says of itself.


@pytest.mark.parametrize("regularization", (1e-6, 1e-4, 1e-2))
@pytest.mark.parametrize("scale", slow_but((1.0,), (1.0, 1e-20)))
@pytest.mark.parametrize("rank", (0, None))
def test_the_residual_is_that_of_the_system_in_float64(scale, regularization, rank, seed):
    """Products in float32 say less of a large w, and less still of points whose squares it cannot
    hold."""
    x, y = torch.randn(200, 3) * scale, torch.randn(200, 2)
    arguments = {"bandwidth": scale}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        w, residual, _ = linalg.solve_kernel(
            kernlib.matern32(), x, y, regularization=regularization, rank=rank, **arguments
        )
    k = kernlib.run_kernel(kernlib.matern32(), x.double(), x.double(), **arguments)
    k.diagonal().add_(regularization)
    torch.testing.assert_close(residual, relative(k, w, y), rtol=1e-6, atol=1e-12)
    assert bool(said) == bool((residual > 1e-6).any())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_of_nan_has_no_solution(bad):
    b = torch.ones(3, 2)
    with pytest.warns(kernlib.ConvergenceWarning, match="2 of 2 residuals are NaN, as their x is"):
        found = linalg.conjugate_gradient(lambda v: v * bad, b)
    assert found.x.isnan().all() and found.residual.isnan().all()
    factor = torch.full((2, 2), bad)
    with pytest.warns(kernlib.ConvergenceWarning, match="1 of 1 residuals are NaN, as their x is"):
        found = linalg.masked_kron_solve([factor], b[:2, 0], torch.tensor([0, 1]), noise=1.0)
    assert found.x.isnan().all()


def test_each_line_of_a_caller_is_warned_of_its_own_solution(points):
    x, y = points[:100], torch.randn(100, dtype=torch.float64)
    given = {"regularization": 1e-3, "bandwidth": 2.0, "max_iter": 1, "rank": 0}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            linalg.solve_kernel(kernlib.gaussian(), x, y, **given)
        linalg.solve_kernel(kernlib.gaussian(), x, y, **given)
    places = [(each.filename, each.lineno) for each in said]
    assert len(set(places)) == 2 and {file for file, _ in places} == {__file__}


def test_what_did_not_converge_warns(points):
    x, y = points[:100], torch.randn(100, dtype=torch.float64)
    arguments = {"regularization": 1e-3, "bandwidth": 2.0}
    with pytest.warns(kernlib.ConvergenceWarning, match=r"solve_kernel: the residual .* above tol"):
        found = linalg.solve_kernel(kernlib.gaussian(), x, y, max_iter=1, rank=0, **arguments)
    assert found.residual > 1e-6
    a, b = spread_out(50, 6, torch.float64), torch.randn(50, 3, dtype=torch.float64)
    with pytest.warns(kernlib.ConvergenceWarning, match="3 of 3 residuals.* after 2 iterations"):
        linalg.conjugate_gradient(a.__matmul__, b, max_iter=2)
    b[7, 1] = torch.nan
    with pytest.warns(kernlib.ConvergenceWarning, match="1 of 3 residuals are NaN") as said:
        linalg.conjugate_gradient(a.__matmul__, b)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linalg.solve_kernel(kernlib.gaussian(), x, y, **arguments)
        linalg.conjugate_gradient(a.__matmul__, b, max_iter=2, tol=0)  # as far as it goes


@pytest.mark.parametrize("value, word", ((torch.nan, "NaN"), (torch.inf, "infinity")))
@pytest.mark.parametrize("name", ("x", "y"))
def test_data_that_are_not_finite_are_said_to_be(name, value, word, points):
    given = {"x": points[:50].clone(), "y": torch.ones(50, dtype=torch.float64)}
    given[name][7] = value
    x, y = given.values()
    arguments = {"regularization": 1.0, "bandwidth": 1.0}
    for rank in (0, 5):
        with pytest.raises(ValueError, match=f"{name} must be finite, and holds {word}"):
            linalg.solve_kernel(kernlib.gaussian(), x, y, rank=rank, **arguments)
    if name == "x":
        with pytest.raises(ValueError, match=f"x must be finite, and holds {word}"):
            linalg.nystrom(kernlib.gaussian(), x, 5, **arguments)


def test_a_nan_of_the_kernel_alone_is_said_to_be_one(points):
    with pytest.raises(torch.linalg.LinAlgError, match="kernel matrix holds NaN"):
        linalg.nystrom(kernlib.dot_product(), points * 1e200, 5, regularization=1.0)


SOLVES = {
    "conjugate_gradient": lambda a, x, b: linalg.conjugate_gradient(lambda v: a @ v, b, tol=1e-4),
    "preconditioned": lambda a, x, b: linalg.conjugate_gradient(
        lambda v: a @ v, b, preconditioner=lambda v: v @ torch.eye(2, device="cpu").to(v), tol=1e-4
    ),
    "nystrom": lambda a, x, b: linalg.nystrom(
        kernlib.gaussian(), x, 40, regularization=1e-2, bandwidth=1.0,
        generator=torch.Generator().manual_seed(0),
    ),
    "solve_kernel": lambda a, x, b: linalg.solve_kernel(
        kernlib.gaussian(), x, b, regularization=1e-2, bandwidth=1.0, rank=10, tol=1e-3,
        generator=torch.Generator().manual_seed(0),
    ),
    "solve_cholesky": lambda a, x, b: linalg.solve_cholesky(a, b),
    "solve_lu": lambda a, x, b: linalg.solve_lu(a, b),
    "eigh": lambda a, x, b: linalg.eigh(a)[::2],
}  # fmt: skip
A40 = torch.diag(torch.linspace(1, 20, 40)) + 0.01
X40, B40 = torch.sin(torch.arange(120.0)).view(40, 3) * 3, torch.cos(torch.arange(80.0)).view(40, 2)
ALONE = {name: solve(A40, X40, B40) for name, solve in SOLVES.items()}


@pytest.mark.parametrize("where", SURROUNDINGS)
@pytest.mark.parametrize("name", SOLVES)
def test_surroundings_change_nothing(name, where):
    with SURROUNDINGS[where]():
        found = SOLVES[name](A40, X40, B40)
    for part, wanted in zip(found, ALONE[name], strict=True):
        if isinstance(part, torch.Tensor):
            assert part.dtype == wanted.dtype and part.device == wanted.device
            torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-4)
