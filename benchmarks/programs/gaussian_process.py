"""Iterations of training an exact Gaussian process: kernlib's kernel with torch's Cholesky
decomposition, eager and in a CUDA graph, beside GPyTorch, which takes conjugate gradients above 800
points. GPyTorch counts where `gpytorch` is installed."""

from __future__ import annotations

from functools import partial

import torch

import kernlib as kl
from benchmarks.programs.problems import Call, Calls, Program, captured

# Points, and how many times kernlib's time GPyTorch's has to be, eager and captured.
MUSTS = {500: (2.0, 3.0), 2000: (12.0, 15.0)}
FEATURES, RATE = 8, 0.01
SCALES = (0.7, 0.7, 0.1)  # where bandwidth, scale and the noise's deviation begin


def data(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y."""
    x = torch.rand(count, FEATURES, device=device)
    return x, torch.sin(x.sum(1) * 3) + 0.1 * torch.randn(count, device=device)


def kernlib_step(x: torch.Tensor, y: torch.Tensor, in_graph: bool = False) -> Call:
    """One iteration; ``in_graph`` makes one that never waits for the GPU, for a CUDA graph. It
    returns the negative log marginal likelihood up to a constant."""
    leaves = [torch.tensor(value, device=x.device, requires_grad=True) for value in SCALES]
    bandwidth, scale, noise = leaves
    optimizer = torch.optim.Adam(leaves, RATE, capturable=in_graph)
    gaussian = kl.gaussian(symmetric=True)
    identity = torch.eye(len(x), device=x.device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        kernel = kl.run_kernel(gaussian, x, bandwidth=bandwidth)
        covariance = scale * kernel + noise.square() * identity
        if in_graph:
            factor = torch.linalg.cholesky_ex(covariance).L
        else:
            factor = torch.linalg.cholesky(covariance)
        solution = torch.cholesky_solve(y[:, None], factor)[:, 0]
        loss = 0.5 * (y @ solution) + factor.diagonal().log().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def gpytorch_step(x: torch.Tensor, y: torch.Tensor) -> Call:
    """One iteration by GPyTorch, as its tutorial has it. Raises ImportError without it."""
    import gpytorch

    class ExactGP(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, points):
            mean, covariance = self.mean(points), self.kernel(points)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x.device)
    model = ExactGP(likelihood).to(x.device)
    model.train()
    likelihood.train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), RATE)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -marginal(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def calls(count: int, is_captured: bool, device: str) -> Calls:
    x, y = data(count, device)
    ours = kernlib_step(x, y, is_captured)
    ours = captured(ours) if is_captured else ours
    return Calls(ours, {"gpytorch": lambda: gpytorch_step(x, y)})


def programs() -> list[Program]:
    return [
        Program(f"gp step n={count}{' captured' * is_captured}",
                partial(calls, count, is_captured), "ms", "gpytorch", 1 / musts[is_captured])
        for is_captured in (False, True)
        for count, musts in MUSTS.items()
    ]  # fmt: skip
