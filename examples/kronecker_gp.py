"""A Gaussian process on a grid of 64 x 64 x 64 points: fitted, and predicted between them.

    python examples/kronecker_gp.py [--device cuda] [--size 64] [--missing 0.3] [--plot slice.png]

The kernel is a product of one for each axis, so that on a grid the covariance of all points is a
Kronecker product ``K = K1 ⊗ K2 ⊗ K3`` of matrices (64, 64). K itself would take 550 GB; what is
made here is a few numbers a point. There are three steps:

- fit: lengthscales, scale and noise by L-BFGS on the negative log marginal likelihood
  ``(y^T (K + noise I)^-1 y + log det(K + noise I) + n log 2 pi) / 2``, which is exact, by the
  eigenvalues of K1, K2 and K3;
- all points: the weights ``w = (K + noise I)^-1 y`` in the same way. ``(C1 ⊗ C2 ⊗ C3) w`` predicts
  at the centres of all cells, with C_i the kernel between centres and points of an axis;
- some missing: with rows P of the identity for the points that are there, ``P K P^T + noise I`` is
  no Kronecker product. Products with it are, and conjugate gradients need nothing else.

The data are made here: a smooth random function, and noise of a third of its spread. GPyTorch's
linear_operator, if installed, solves for the weights of all points too, alone and by kernlib. Runs
in float64 on the first CUDA GPU with 64 points an axis, or on the CPU when there is none, with 32.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

import kernlib as kl
from kernlib.compat import linear_operator as compat

ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
SIZE = {"cpu": 32, "cuda": 64}
LENGTHS, NOISE, WAVES = (0.2, 0.3, 0.5), 0.1, 200  # of the function, whose scale is 1
TOLERANCE = 1e-5  # of the conjugate gradients' residual, far below the noise
BOUND, FEW = 1e-3, 16  # of residuals, and how many equations are looked at for them
ENOUGH = 16  # points an axis that leave a third of the noise's spread in predictions, or less

Axes = list[torch.Tensor]  # for each axis: its coordinates, or a matrix


class Model(NamedTuple):
    lengths: torch.Tensor  # of the axes
    scale: torch.Tensor  # a variance, as the noise is
    noise: torch.Tensor

    def factors(self, a: Axes, b: Axes) -> Axes:
        """The kernel between two grids: a matrix for each axis."""
        scaled = [(u[:, None] - v) / size for u, v, size in zip(a, b, self.lengths, strict=True)]
        first, *rest = [torch.exp(-distance.square() / 2) for distance in scaled]
        return [self.scale * first, *rest]


def smooth(random: torch.Generator, device: str) -> Callable[[Axes], torch.Tensor]:
    """A function on grids: waves whose frequencies have the spectrum of the kernel. Each is a
    product too, ``exp(i (a x + b y + c z)) = exp(i a x) exp(i b y) exp(i c z)``."""
    drawn = torch.randn(3, WAVES, generator=random, dtype=torch.float64).to(device)
    phases = 2 * math.pi * torch.rand(WAVES, generator=random, dtype=torch.float64).to(device)

    def values(grid: Axes) -> torch.Tensor:
        axes = zip(grid, drawn, LENGTHS, strict=True)
        x, y, z = (torch.exp(1j * u[:, None] * each / length) for u, each, length in axes)
        amplitudes = math.sqrt(2 / WAVES) * torch.exp(1j * phases)
        return torch.einsum("iw,jw,kw->ijk", amplitudes * x, y, z).real.flatten()

    return values


# The three steps. Weights are those of all points of the grid, 0 where one is missing.


def fit(grid: Axes, y: torch.Tensor) -> Model:
    logs = torch.zeros(5, dtype=y.dtype, device=y.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=40, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        model = Model(logs[:3].exp(), logs[3].exp(), logs[4].exp())
        factors = model.factors(grid, grid)
        misfit = y @ kl.linalg.kron_solve(factors, y, noise=model.noise)
        volume = kl.linalg.kron_logdet(factors, noise=model.noise)
        value = ((misfit + volume) / len(y) + math.log(2 * math.pi)) / 2
        value.backward()
        return value

    optimizer.step(loss)
    found = logs.detach().exp()
    return Model(found[:3], found[3], found[4])


def solve(factors: Axes, noise: torch.Tensor, y: torch.Tensor, seen: torch.Tensor):
    if len(seen) == len(y):
        return kl.linalg.kron_solve(factors, y, noise=noise)
    found = kl.linalg.masked_kron_solve(factors, y[seen], seen, noise=noise, tol=TOLERANCE)
    return torch.zeros_like(y).index_copy(0, seen, found.x)


def by_gpytorch(factors: Axes, noise: torch.Tensor, y: torch.Tensor, _) -> torch.Tensor:
    operators = importlib.import_module("linear_operator.operators")
    return operators.KroneckerProductLinearOperator(*factors).add_diagonal(noise).solve(y)


# What comes out.


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


def measured(device: str, call: Callable, *arguments) -> tuple[Any, str]:
    """What a call returns, its seconds and its memory, after a first one has loaded its needs."""
    call(*arguments)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start, memory = time.perf_counter(), "-"
    found = call(*arguments)
    if device == "cuda":
        torch.cuda.synchronize()
        memory = f"{torch.cuda.max_memory_allocated() / 1e6:.0f}"
    return found, f"{time.perf_counter() - start:8.4f} {memory:>8s}"


def residual(factors: Axes, noise, w: torch.Tensor, y: torch.Tensor, seen: torch.Tensor):
    """Of a few of the equations, by rows of K that are made for it, over y."""
    some = seen[torch.linspace(0, len(seen) - 1, FEW, device=seen.device).long()]
    parts = torch.unravel_index(some, [len(factor) for factor in factors])
    rows = torch.einsum("ra,rb,rc->rabc", *[f[i] for f, i in zip(factors, parts, strict=True)])
    return ((rows.flatten(1) @ w + noise * w[some] - y[some]).norm() / y[some].norm()).item()


def plot(parts: dict[str, torch.Tensor], path: Path) -> None:
    """The middle slice of each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(parts), 3.2), layout="constrained")
    for axis, (name, part) in zip(figure.subplots(1, len(parts)), parts.items(), strict=True):
        side = round(len(part) ** (1 / 3))
        shown = part.view(side, side, side)[:, :, side // 2].cpu()
        axis.imshow(shown, vmin=-2.5, vmax=2.5, extent=(0, 1, 0, 1), origin="lower")
        axis.set_title(name)
    figure.savefig(path)
    print(f"wrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(SIZE), default=default)
    parser.add_argument("--size", type=int, help="points an axis: 64, or 32 on a CPU")
    parser.add_argument("--missing", type=float, default=0.3, help="part of the points")
    parser.add_argument("--plot", type=Path, help="write a slice here")
    options = parser.parse_args()
    options.size = SIZE[options.device] if options.size is None else options.size
    if options.size < 4 or not 0 <= options.missing <= 0.9:
        parser.error("--size must be 4 or more, and --missing from 0 to 0.9")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main() -> None:
    options = parse()
    device, missing = options.device, f"{options.missing:.0%} missing"
    points = torch.linspace(0, 1, options.size, dtype=torch.float64, device=device)
    grid, centres = [points] * 3, [(points[1:] + points[:-1]) / 2] * 3
    function = smooth(random := torch.Generator().manual_seed(0), device)
    wanted, y = function(centres), function(grid)
    y += math.sqrt(NOISE) * torch.randn(len(y), generator=random, dtype=y.dtype).to(device)
    every = torch.randperm(len(y), generator=random).to(device)
    seen = every[round(options.missing * len(y)) :].sort().values

    model, taken = measured(device, fit, grid, y)
    factors, cross = model.factors(grid, grid), model.factors(centres, grid)
    ways: dict[str, tuple[Callable, torch.Tensor]] = {"all points": (solve, every)}
    if importlib.util.find_spec("linear_operator"):
        ways["all, linear_operator"] = by_gpytorch, every
        ways["all, that by kernlib"] = compat.enabled()(by_gpytorch), every
    ways[missing] = solve, seen
    predicted, table, errors = {}, [f"{'fit':20s} {taken}"], []
    for name, (way, there) in watched(ways.items(), "solving"):
        w, taken = measured(device, way, factors, model.noise, y, there)
        predicted[name] = kl.kron_matmul(w, cross, side="left")
        rmse = (predicted[name] - wanted).square().mean().sqrt().item()
        table.append(f"{name:20s} {taken} {rmse:8.4f}")
        error = residual(factors, model.noise, w, y, there)
        errors.append(f"{name:20s} {device:5s} relative error {error:.1e}")
        if not error <= BOUND or (options.size >= ENOUGH and not rmse <= math.sqrt(NOISE) / 3):
            raise SystemExit(f"{name}: the error is {error:.1e}, that of predictions {rmse:.3f}")
    print(*errors, sep="\n")
    print("\nlengthscales, scale and noise", *(f"{v:.3f}" for v in torch.hstack(model).tolist()))
    print(f"\n{'':20s} {'seconds':>8s} {'peak MB':>8s} {'RMSE':>8s}", *table, sep="\n")
    if device == "cpu":
        print(ON_CPU)
    if options.plot:
        observed = torch.full_like(y, math.nan).index_copy(0, seen, y[seen])
        parts = {"function": wanted, missing: observed, "prediction": predicted[missing]}
        plot({**parts, "from all points": predicted["all points"]}, options.plot)


if __name__ == "__main__":
    main()
