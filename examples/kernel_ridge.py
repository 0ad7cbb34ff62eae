"""Kernel ridge regression three ways: directly, without the kernel matrix, and in plain torch.

    python examples/kernel_ridge.py [--device cuda] [--train 60000] [--plot ridge.png]

Each way solves ``(K(x, x) + ridge I) w = y`` with a Gaussian kernel; ``K(points, x) w`` predicts:

- direct: K, ridge included, in one launch, solved by Cholesky in K's own memory;
- matrix-free: conjugate gradients with a Nyström preconditioner over products with K, which are
  computed anew each time, so that K is never stored;
- plain torch: torch.cdist, exp and torch.linalg.cholesky.

The data are made here: a smooth function of 64 features, each of less weight than the one before,
learnt from points with noise of a fifth of its spread and tested at others without. ``--plot`` also
fits 1/8, 1/4 and 1/2 of the points and draws the error over time and memory; it needs matplotlib.
Runs on the first CUDA GPU with 60000 points, whose K has 14.4 GB, or on the CPU when there is none,
with 2000.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kernlib as kl

ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
TRAIN = {"cpu": 2000, "cuda": 60000}
WAVES, FREQUENCY, DECAY, NOISE = 16, 3.0, 0.75, 0.2
TOLERANCE = 1e-4  # of the conjugate gradients' residual, far below the noise
BOUND = 1e-2  # of residuals against float64, and between the ways' predictions
ACCURACY, ENOUGH = 0.9, 1000  # R^2 that each way reaches from this many points on
FEW = 64  # equations that are checked in float64


class Data(NamedTuple):
    x: torch.Tensor  # (N, features)
    y: torch.Tensor  # (N,)
    points: torch.Tensor  # to predict, and the function there
    values: torch.Tensor

    def first(self, count: int) -> Data:
        """The same with fewer points to learn from."""
        return self._replace(x=self.x[:count], y=self.y[:count])


class Model(NamedTuple):
    bandwidth: float
    ridge: float
    tolerance: float


class Result(NamedTuple):
    way: str
    points: int  # to learn from
    predictions: torch.Tensor
    r2: float
    rmse: float
    seconds: float
    peak_mb: float
    error: float


def make(train: int, features: int, seed: int, device: str) -> Data:
    """Waves in random directions, scaled to a spread of 1, and noise on those to learn from."""
    count = train + max(train // 5, 100)
    random: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(seed),
        "device": device,
    }
    x = torch.randn(count, features, **random)
    x /= torch.arange(1, features + 1, device=device) ** DECAY
    directions = torch.nn.functional.normalize(torch.randn(WAVES, features, **random))
    phases = 2 * math.pi * torch.rand(WAVES, **random)
    y = torch.sin(FREQUENCY * x @ directions.T + phases) @ torch.randn(WAVES, **random)
    y = (y - y.mean()) / y.std()
    noisy = y[:train] + NOISE * torch.randn(train, **random)
    return Data(x[:train], noisy, x[train:], y[train:])


# The three ways: each gives the weights and the predictions.


def direct(data: Data, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    width = model.bandwidth
    k = kl.run_kernel(
        kl.gaussian(symmetric=True), data.x, bandwidth=width, regularization=model.ridge
    )
    w, _, _ = kl.linalg.solve_cholesky(k, data.y, overwrite_a=True, check_errors=True)
    return w, kl.kernel_matmul(kl.gaussian(), data.points, data.x, w, bandwidth=width)


def matrix_free(data: Data, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    width, random = model.bandwidth, torch.Generator(data.x.device).manual_seed(0)
    found = kl.linalg.solve_kernel(
        kl.gaussian(), data.x, data.y, regularization=model.ridge, tol=model.tolerance,
        check_every=5, generator=random, bandwidth=width,
    )  # fmt: skip
    return found.x, kl.kernel_matmul(kl.gaussian(), data.points, data.x, found.x, bandwidth=width)


def plain_torch(data: Data, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    def gaussian(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * model.bandwidth**2))

    k = gaussian(data.x, data.x)
    k.diagonal().add_(model.ridge)
    w = torch.cholesky_solve(data.y[:, None], torch.linalg.cholesky(k))[:, 0]
    del k
    return w, gaussian(data.points, data.x) @ w


WAYS = {"direct": direct, "matrix-free": matrix_free, "plain torch": plain_torch}


# What they are measured by.


def measure(way: str, data: Data, model: Model) -> Result:
    device = data.x.device.type
    # The first call loads what it needs, on a GPU kernels that depend on the number of points.
    WAYS[way](data if device == "cuda" else data.first(FEW), model)
    reset_peak(device)
    start = now(device)
    w, predictions = WAYS[way](data, model)
    seconds, peak = now(device) - start, peak_mb(device)
    left = (predictions - data.values).square().mean()
    r2 = (1 - left / data.values.var(correction=0)).item()
    error = residual(data, model, w)
    return Result(way, len(data.x), predictions, r2, left.sqrt().item(), seconds, peak, error)


def residual(data: Data, model: Model, w: torch.Tensor) -> float:
    """Of some of the equations, over y, in float64 and by differences."""
    some = torch.arange(FEW, device=w.device) * (len(w) - 1) // (FEW - 1)
    x, y, w = data.x.double(), data.y[some].double(), w.double()
    squares = torch.stack([(x - point).square().sum(1) for point in x[some]])
    found = torch.exp(squares / (-2 * model.bandwidth**2)) @ w + model.ridge * w[some]
    return ((found - y).norm() / y.norm()).item()


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# Peak memory: of torch's tensors on a GPU, of the process on the CPU, where Linux can begin anew.


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # then it is the peak since the process began
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(float(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


# What comes out.


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


def check(results: list[Result], device: str) -> None:
    """Each way solves its equations, explains the data, and predicts what plain torch does."""
    reference = {r.points: r.predictions for r in results if r.way == "plain torch"}
    for found in results:
        wanted = reference[found.points]
        apart = ((found.predictions - wanted).norm() / wanted.norm()).item()
        beside = f", predictions {apart:.1e} from plain torch's"
        print(f"{found.way:12s} {found.points:6d} points  {device:5s} relative error "
              f"{found.error:.1e}{'' if found.way == 'plain torch' else beside}")  # fmt: skip
        if not max(found.error, apart) <= BOUND:
            raise SystemExit(f"{found.way}: an error is above {BOUND:g}")
        if found.points >= ENOUGH and not found.r2 >= ACCURACY:
            raise SystemExit(f"{found.way}: R^2 is below {ACCURACY}")


def print_table(results: list[Result]) -> None:
    table = Table(title="kernel ridge regression")
    for column in ("way", "points", "R^2", "test RMSE", "seconds", "peak MB"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for r in results:
        table.add_row(r.way, f"{r.points}", f"{r.r2:.4f}", f"{r.rmse:.4f}", f"{r.seconds:.3f}",
                      f"{r.peak_mb:.0f}")  # fmt: skip
    Console().print(table)


def plot(results: list[Result], path: Path) -> None:
    """Error over time and over memory: a line for each way, a point for each number of points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    labels = "seconds", "peak MB"
    for axis, label, what in zip(axes, labels, ("seconds", "peak_mb"), strict=True):
        for way in WAYS:
            own = [r for r in results if r.way == way]
            axis.loglog([getattr(r, what) for r in own], [r.rmse for r in own], "o-", label=way)
            for r in own:
                axis.annotate(f" {r.points}", (getattr(r, what), r.rmse), fontsize=7)
        axis.set_xlabel(label)
        axis.tick_params(axis="x", which="both", labelsize=7, labelrotation=30)
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("test RMSE")
    axes[0].legend()
    figure.savefig(path)
    print(f"wrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(TRAIN), default=default)
    parser.add_argument("--train", type=int, help="points to learn from: 60000, or 2000 on a CPU")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bandwidth", type=float, default=2.0)
    parser.add_argument("--ridge", type=float, default=0.1)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="without the matrix")
    parser.add_argument("--plot", type=Path, help="write error over time and memory here")
    options = parser.parse_args()
    options.train = TRAIN[options.device] if options.train is None else options.train
    for name, least in (("train", 8), ("features", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be {least} or more, got {getattr(options, name)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main() -> None:
    options = parse()
    data = make(options.train, options.features, options.seed, options.device)
    model = Model(options.bandwidth, options.ridge, options.tolerance)
    parts = (8, 4, 2, 1) if options.plot else (1,)
    fits = [(way, options.train // part) for part in parts for way in WAYS]
    results = [measure(way, data.first(n), model) for way, n in watched(fits, "fitting")]
    check(results, options.device)
    print_table(results)
    if options.device == "cpu":
        print(ON_CPU)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
