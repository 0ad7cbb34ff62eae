"""GPyTorch's models with linear_operator's Kronecker products by kernlib, and without."""

import pytest
import torch

from kernlib.compat import linear_operator as compat

DOUBLE = torch.float64


@pytest.fixture
def gpytorch():
    return pytest.importorskip("gpytorch")


def trained(gpytorch, likelihood, normal, mean, kernel, x, y, points):
    """Loss, gradients, and the predicted means and variances of a model."""

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, likelihood)
            self.mean, self.kernel = mean, kernel

        def forward(self, x):
            return normal(self.mean(x), self.kernel(x))

    model = Model().double().train()
    loss = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    value = -loss(model(x), y)
    gradients = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    model.eval()
    with torch.no_grad():
        found = likelihood(model(points))
    parts = [value.detach(), found.mean, found.variance, *gradients]
    return torch.cat([part.flatten() for part in parts if part is not None])


def compared(build):
    """The status after a model that agrees with the same one without kernlib."""
    alone = build()
    with compat.enabled():
        found = build()
        status = compat.status()
    assert status.answered, status
    torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-10)
    return status


def test_a_multitask_model(gpytorch, seed):
    """Its solves multiply by eigenvectors; its covariance has a structured factor."""
    x, points = torch.linspace(0, 1, 11, dtype=DOUBLE), torch.linspace(0.05, 0.9, 5, dtype=DOUBLE)
    y = torch.stack([torch.sin(6 * x), torch.cos(6 * x)], -1) + 0.1 * torch.randn(
        11, 2, dtype=DOUBLE
    )

    def build():
        torch.manual_seed(seed)  # of parameters that are random at first
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
        normal = gpytorch.distributions.MultitaskMultivariateNormal
        mean = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        kernel = gpytorch.kernels.RBFKernel()
        kernel = gpytorch.kernels.MultitaskKernel(kernel, num_tasks=2, rank=1)
        return trained(gpytorch, likelihood, normal, mean, kernel, x, y, points)

    with gpytorch.settings.max_cholesky_size(0):  # as larger models are
        status = compared(build)
    assert set(status.reasons) == {"a factor is a PsdSumLinearOperator"}


@pytest.mark.filterwarnings("ignore:The input matches the stored training data")
def test_a_grid_model(gpytorch, seed):
    grid = [torch.linspace(0, 1, size, dtype=DOUBLE) for size in (5, 6, 5)]
    x = gpytorch.utils.grid.create_data_from_grid(grid)
    y = torch.sin(4 * x).sum(-1) + 0.1 * torch.randn(len(x), dtype=DOUBLE)

    def build():
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        normal, mean = gpytorch.distributions.MultivariateNormal, gpytorch.means.ConstantMean()
        kernel = gpytorch.kernels.GridKernel(gpytorch.kernels.RBFKernel(), grid=grid)
        return trained(gpytorch, likelihood, normal, mean, kernel, x, y, x)

    with gpytorch.settings.use_toeplitz(False):
        assert not compared(build).fell_back
