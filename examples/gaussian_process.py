"""An exact Gaussian process on 50000 points in 10 dimensions, trained and predicting matrix-free.

    python examples/gaussian_process.py [--device cuda] [--train 50000] [--steps 30] [--plot gp.png]

The covariance of the data is ``A = s K(x, x) + noise I`` with a Gaussian kernel K. Stored, K has
10 GB; here it never is. Training minimises the negative log marginal likelihood
``(y^T A^-1 y + log det A + n log 2 pi) / 2`` by Adam over the logarithms of the bandwidth, s and
the noise. Its gradient needs no determinant: with ``alpha = A^-1 y``, random signs ``z`` and
``u = A^-1 z`` it is that of

    (mean_z u^T A z - alpha^T A alpha) / 2, in which only A moves,

so that a step is one solve of a few right-hand sides by conjugate gradients (kernel_matmul, with a
Nyström preconditioner) and one differentiable product. Predictions are ``s K(x*, x) alpha``, with
variances from another solve for some of the points.

The data are made here: a random function drawn from such a process, and noise. GPyTorch, if
installed, trains beside it on the same data. Each takes one step before it is timed, in which
kernels are compiled. Runs in float32 on the first CUDA GPU, or on the CPU when there is none, with
1000 points.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.optim does so at its first optimizer: seconds of neither way below
from rich.console import Console
from rich.progress import track

import kernlib as kl

ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
TRAIN = {"cpu": 1000, "cuda": 50000}
TEST, UNCERTAIN = 1000, 200  # points, and those of which variances are computed
DIMENSIONS, WAVES = 10, 500
BANDWIDTH, NOISE = 4.0, 0.04  # of the function, whose variance is 1
STEPS, RATE, PROBES = 30, 0.1, 8
TOLERANCE, ACCURATE = 1e-2, 1e-4  # of solves while training, and for predictions
BOUND, FEW = 1e-3, 16  # of residuals, and how many equations are looked at for them
GAUSSIAN = kl.gaussian()


class Model(NamedTuple):
    bandwidth: torch.Tensor
    scale: torch.Tensor  # a variance, as the noise is
    noise: torch.Tensor

    def product(self, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``s K(a, b) v``."""
        return self.scale * kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=self.bandwidth)


class Data(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


def made(count: int, device: str) -> Data:
    """Waves whose frequencies have the spectrum of the kernel, at points of a normal distribution,
    and noise."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(DIMENSIONS, WAVES, generator=random) / BANDWIDTH
    phases = 2 * math.pi * torch.rand(WAVES, generator=random)
    x = torch.randn(count + TEST, DIMENSIONS, generator=random)
    y = math.sqrt(2 / WAVES) * torch.cos(x @ drawn + phases).sum(1)
    y += math.sqrt(NOISE) * torch.randn(len(y), generator=random)
    x, y = x.to(device), y.to(device)
    return Data(x[:count], y[:count], x[count:], y[count:])


def solve(model: Model, x: torch.Tensor, b: torch.Tensor, tolerance: float) -> torch.Tensor:
    """``A^-1 b``, of ``A / s``."""
    ratio = (model.noise / model.scale).item()
    rank = min(len(x), 2 * math.isqrt(len(x)))
    random = torch.Generator(x.device).manual_seed(0)
    before = kl.linalg.nystrom(
        GAUSSIAN, x, rank, regularization=ratio, generator=random, bandwidth=model.bandwidth
    )

    def product(v: torch.Tensor) -> torch.Tensor:
        return kl.kernel_matmul(GAUSSIAN, x, x, v, bandwidth=model.bandwidth).add_(v, alpha=ratio)

    found = kl.linalg.conjugate_gradient(product, b, preconditioner=before, tol=tolerance)
    return found.x / model.scale


def fit(data: Data, steps: int, title: str) -> tuple[Model, list[list[float]]]:
    """The model, and what it was at each step."""
    x, y = data.x, data.y
    logs = torch.tensor([1.0, 0.0, -1.0], device=x.device, requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=RATE)
    random, history = torch.Generator(x.device).manual_seed(1), []
    for _ in watched(range(steps), title):
        with torch.no_grad():
            signs = torch.randint(0, 2, (len(x), PROBES), generator=random, device=x.device)
            b = torch.cat((y[:, None], 2.0 * signs - 1.0), 1)
            solved = solve(Model(*logs.exp()), x, b, TOLERANCE)
        model = Model(*logs.exp())
        right = torch.cat((solved[:, :1], b[:, 1:]), 1)  # alpha, then z
        products = solved * (model.product(x, x, right) + model.noise * right)
        weights = torch.full_like(products[0], 1 / PROBES)
        weights[0] = -1.0
        optimizer.zero_grad()
        ((products.sum(0) * weights).sum() / (2 * len(x))).backward()
        optimizer.step()
        history.append(logs.detach().exp().tolist())
    return Model(*logs.detach().exp()), history


def predict(data: Data, model: Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights, means at the test points, and variances with noise at some of them."""
    alpha = solve(model, data.x, data.y[:, None], ACCURATE)
    mean = model.product(data.x_test, data.x, alpha)[:, 0]
    some = data.x_test[:UNCERTAIN]
    cross = model.scale * kl.run_kernel(GAUSSIAN, data.x, some, bandwidth=model.bandwidth)
    explained = (cross * solve(model, data.x, cross, TOLERANCE)).sum(0)
    return alpha, mean, (model.scale - explained).clamp_min(0) + model.noise


def by_gpytorch(data: Data, steps: int, title: str) -> tuple[Model, list[list[float]]]:
    """The same by GPyTorch, from the same start."""
    gpytorch: Any = importlib.import_module("gpytorch")

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(data.x, data.y, likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(data.x.device)
    exact = Exact(likelihood).to(data.x.device)
    exact.covariance.base_kernel.initialize(lengthscale=math.exp(1.0))
    exact.covariance.initialize(outputscale=1.0)
    likelihood.initialize(noise=math.exp(-1.0))
    optimizer = torch.optim.Adam(exact.parameters(), lr=RATE)
    likelihood_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, exact)
    exact.train()
    history = []
    for _ in watched(range(steps), title):
        optimizer.zero_grad()
        (-likelihood_of(exact(data.x), data.y)).backward()
        optimizer.step()
        base = exact.covariance.base_kernel
        found = base.lengthscale, exact.covariance.outputscale, likelihood.noise
        history.append([value.item() for value in found])
    model = Model(*torch.tensor(history[-1], device=data.x.device))
    return model, history


# What comes out.


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


def measured(device: str, call: Callable, *arguments) -> tuple[Any, float, str]:
    """What a call returns, its seconds, and its memory in MB beside what there is."""
    memory, before = "-", 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    found = call(*arguments)
    if device == "cuda":
        torch.cuda.synchronize()
        memory = f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.0f}"
    return found, time.perf_counter() - start, memory


def residual(data: Data, model: Model, alpha: torch.Tensor) -> float:
    """Of a few of the equations, by rows of A that are made for it in float64, over y."""
    some = torch.linspace(0, len(data.x) - 1, FEW, device=data.x.device).long()
    x, y, wide = data.x.double(), data.y[some].double(), Model(*(v.double() for v in model))
    distances = torch.cdist(x[some], x, compute_mode="donot_use_mm_for_euclid_dist")
    rows = wide.scale * torch.exp(-(distances / wide.bandwidth).square() / 2)
    left = rows @ alpha[:, 0].double() + wide.noise * alpha[some, 0].double() - y
    return (left.norm() / y.norm()).item()


def log_density(y: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> float:
    """The mean of a normal distribution's logarithm at the test points that have a variance."""
    y, mean = y[: len(variance)], mean[: len(variance)]
    terms = (y - mean).square() / variance + variance.log() + math.log(2 * math.pi)
    return -terms.mean().item() / 2


def plot(histories: dict[str, list[list[float]]], path: Path) -> None:
    """Bandwidth, scale and noise over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    for axis, index, name in zip(
        figure.subplots(1, 3), range(3), ("bandwidth", "scale", "noise"), strict=True
    ):
        for way, history in histories.items():
            axis.plot([step[index] for step in history], label=way)
        axis.set(title=name, xlabel="step")
    figure.axes[0].legend()
    figure.savefig(path)
    print(f"wrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(TRAIN), default=default)
    parser.add_argument("--train", type=int, help="points: 50000, or 1000 on a CPU")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--plot", type=Path, help="write what was learnt here")
    options = parser.parse_args()
    options.train = TRAIN[options.device] if options.train is None else options.train
    if options.train < 100 or options.steps < 1:
        parser.error("--train must be 100 or more, and --steps 1 or more")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main() -> None:
    options = parse()
    data, ways = made(options.train, options.device), {"kernlib": fit}
    if importlib.util.find_spec("gpytorch"):
        ways["GPyTorch"] = by_gpytorch
    histories, table, errors = {}, [], []
    for name, way in ways.items():
        try:
            _, first, _ = measured(options.device, way, data, 1, f"first step, {name}")
            arguments = options.device, way, data, options.steps, f"training, {name}"
            (model, histories[name]), seconds, memory = measured(*arguments)
        except torch.OutOfMemoryError:
            table.append(f"{name:10s} out of memory")
            continue
        alpha, mean, variance = predict(data, model)
        rmse = (mean - data.y_test).square().mean().sqrt().item()
        density = log_density(data.y_test, mean, variance)
        values = " ".join(f"{value:9.3f}" for value in torch.hstack(model).tolist())
        taken = f"{first:10.2f} {seconds:9.2f} {memory:>8s}"
        table.append(f"{name:10s} {taken} {rmse:8.4f} {density:12.4f} {values}")
        error = residual(data, model, alpha)
        errors.append(f"{name:10s} {options.device:5s} relative error {error:.1e}")
        if not error <= BOUND:
            raise SystemExit(f"{name}: the error of the weights is {error:.1e}")
    print(*errors, sep="\n")
    best = -(math.log(2 * math.pi * NOISE) + 1) / 2
    print(f"\n{options.train} points; a test point's log-density without error: {best:.4f}")
    words = ("first step", 10), (f"{options.steps} steps", 9), ("peak MB", 8), ("RMSE", 8)
    words = *words, ("log-density", 12), ("bandwidth", 9), ("scale", 9), ("noise", 9)
    print(f"\n{'seconds of':10s}", *(f"{word:>{width}s}" for word, width in words))
    print(*table, sep="\n")
    if options.device == "cpu":
        print(ON_CPU)
    if options.plot:
        plot(histories, options.plot)


if __name__ == "__main__":
    main()
