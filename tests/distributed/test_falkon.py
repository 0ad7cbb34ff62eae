"""The Falkon solver, in one process and in several."""

from __future__ import annotations

import tempfile
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

import kernlib as kl

SIZES = 150, 0, 250  # by rank


def rows(dtype=torch.float64):
    generator = torch.Generator().manual_seed(6)
    x = torch.rand((sum(SIZES), 2), generator=generator, dtype=torch.float64)
    y = torch.stack([x.sum(1).sin(), (x[:, 0] * 3).cos()], 1)
    return x.to(dtype), y.to(dtype), x[::10].to(dtype)


def exact(x, y, c, mu: float) -> torch.Tensor:
    """The least-squares solution in float64."""
    x, y, c = x.double(), y.double(), c.double()
    cross, block = (kl.run_kernel(kl.gaussian(), t, c, bandwidth=0.7) for t in (x, c))
    system = cross.mT @ cross / len(x) + mu * block
    return cross @ torch.linalg.lstsq(system, cross.mT @ y / len(x), driver="gelsd").solution


def fit(x, y, c, **options):
    options = {"regularization": 1e-6, "bandwidth": 0.7, "tol": 1e-8, "max_iter": 40, **options}
    return kl.linalg.falkon(kl.gaussian(), x, y, c, **options)


def predicted(x, c, coefficients):
    return kl.kernel_matmul(kl.gaussian(), x, c, coefficients, bandwidth=0.7)


@pytest.mark.parametrize("kind", ["tensor", "array", "map"])
def test_predictions_are_those_of_least_squares(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("kernlib.linalg.streamed.CHUNK_BYTES", 2000)
    x, y, c = rows()
    arrays = [x, y] if kind == "tensor" else [x.numpy(), y.numpy()]
    if kind == "map":
        for place, array in enumerate(arrays):
            numpy.save(tmp_path / f"{place}.npy", array)
        arrays = [numpy.load(tmp_path / f"{place}.npy", mmap_mode="r") for place in (0, 1)]
    result = fit(*arrays, c)
    wanted = exact(x, y, c, 1e-6)
    got = predicted(x, c, result.coefficients)
    assert float((got - wanted).norm() / wanted.norm()) < 3e-5
    assert float(result.residual.max()) <= 1e-8 and result.iterations < 40


def test_one_column_and_float32():
    x, y, c = rows(torch.float32)
    result = fit(x, y[:, 0], c, tol=1e-4)
    assert result.coefficients.shape == (len(c),) and result.residual.dim() == 0
    got = predicted(x, c, result.coefficients[:, None])[:, 0]
    assert float((got - y[:, 0]).norm() / y.norm()) < 1e-2


@pytest.mark.parametrize(
    "change, text",
    [
        ({"x": torch.ones(400, 3)}, "x must be"),
        ({"y": torch.ones(3)}, "y must be"),
        ({"c": torch.ones(0, 2)}, "centres must have rows"),
        ({"regularization": 0.0}, "regularization"),
        ({"checkpoint": "folder"}, "checkpoint needs a group"),
        ({"max_iter": -1}, "max_iter"),
    ],
)
def test_bad_arguments_are_named(change, text):
    x, y, c = rows(torch.float32)
    values = {"x": x, "y": y, "c": c, **change}
    with pytest.raises(ValueError, match=text):
        fit(values.pop("x"), values.pop("y"), values.pop("c"), **values)


@pytest.mark.parametrize("where", ["x", "y"])
def test_rows_that_are_not_finite_are_refused(where):
    x, y, c = rows()
    (x if where == "x" else y)[7, 1] = float("inf")
    with pytest.raises(ValueError, match="holds NaN or infinities"):
        fit(x, y, c)


def not_finite_in_one():
    x, y, c = rows()
    at = dist.get_rank()
    x = x.split(SIZES)[at].clone()
    if at == 2:
        x[3, 0] = float("nan")
    return fit(x, y.split(SIZES)[at], c, group=kl.distributed.Communicator())


def test_rows_of_one_process_that_are_not_finite_are_an_error_in_all(pool):
    answers = pool.run(not_finite_in_one)
    assert all(isinstance(answer, ValueError) for answer in answers), answers


def spread(folder: str | None, max_iter: int = 40):
    x, y, c = rows()
    at = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kl.ConvergenceWarning)
        group = kl.distributed.Communicator()
        return fit(
            x.split(SIZES)[at], y.split(SIZES)[at], c,
            group=group, checkpoint=folder, max_iter=max_iter,
        )  # fmt: skip


def test_processes_fit_what_one_does(pool):
    x, y, c = rows()
    alone = predicted(x, c, fit(x, y, c).coefficients)
    with tempfile.TemporaryDirectory() as folder:
        for answers in (pool.run(spread, None), pool.run(spread, folder, 3)):
            assert not any(isinstance(answer, Exception) for answer in answers), answers
        again = pool.run(spread, folder)
    for answer in (*pool.run(spread, None), *again):
        got = predicted(x, c, answer.coefficients)
        assert float((got - alone).norm() / alone.norm()) < 1e-6
    assert again[0].iterations > 3
