"""Each row of docs/guides/coming_from_keops.md is what torch computes of its formula in float64."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F

import kernlib as kl
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guides" / "coming_from_keops.md").read_text()
ROWS = {
    name: code.replace(r"\|", "|")
    for name, code in re.findall(r"^\| ([^|`]+?) \| .* \| `([^`]+)` \|$", PAGE, re.MULTILINE)
}
S, T, C = 0.9, 1.3, 0.7


def drawn(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    x, y, lower = draw(61, 3), draw(83, 3), draw(3, 3)
    named = {"x": x, "y": y, "v": draw(83, 2), "a": draw(61), "b": draw(83), "g": draw(83)}
    return named | {"L": lower, "w": draw(3).abs() + 0.5, "e": draw(61, 2)}


class Pairs:
    """What rows' formulas share: differences of pairs (M, N, D), and their sums."""

    def __init__(self, names: dict[str, torch.Tensor]):
        self.__dict__.update(names)
        self.apart = self.x[:, None] - self.y[None]
        self.squares = self.apart.square().sum(-1)
        self.far = self.squares.sqrt()
        self.dots = self.x @ self.y.T
        self.angles = F.normalize(self.x) @ F.normalize(self.y).T
        self.gauss = self.gaussian(self.x, self.y)

    def gaussian(self, x, y) -> torch.Tensor:
        return (-(x[:, None] - y[None]).square().sum(-1) / (2 * S**2)).exp()


def matern(r: torch.Tensor, polynomial: torch.Tensor) -> torch.Tensor:
    return polynomial * (-r).exp()


def by_torch(p: Pairs) -> torch.Tensor:
    x = p.x.detach().clone().requires_grad_()
    return torch.autograd.grad(p.gaussian(x, p.y) @ p.v, x, p.e)[0]


REFERENCES = {
    "Gaussian": lambda p: p.gauss @ p.v,
    "Gaussian by its rate": lambda p: (-C * p.squares).exp() @ p.v,
    "exponential, Matérn 1/2": lambda p: (-p.far / S).exp() @ p.v,
    "Laplacian": lambda p: (-p.apart.abs().sum(-1) / S).exp() @ p.v,
    "Matérn 3/2": lambda p: matern(3**0.5 * p.far / S, 1 + 3**0.5 * p.far / S) @ p.v,
    "Matérn 5/2": lambda p: (
        matern(5**0.5 * p.far / S, 1 + 5**0.5 * p.far / S + 5 * p.squares / (3 * S**2)) @ p.v
    ),
    "Cauchy": lambda p: (1 / (1 + p.squares / S**2)) @ p.v,
    "rational quadratic": lambda p: (1 + p.squares / (2 * T * S**2)) ** -T @ p.v,
    "inverse multiquadric": lambda p: (p.squares + C**2).rsqrt() @ p.v,
    "multiquadric": lambda p: (p.squares + C**2).sqrt() @ p.v,
    "energy distance": lambda p: -p.far @ p.v,
    "thin plate": lambda p: (0.5 * p.squares * p.squares.log()) @ p.v,
    "polyharmonic": lambda p: p.far**3 @ p.v,
    "compact support (Wendland)": lambda p: (
        ((1 - p.far / S).relu() ** 4 * (4 * p.far / S + 1)) @ p.v
    ),
    "power exponential": lambda p: (
        (-((p.apart.abs().pow(1.5).sum(-1) ** (1 / 1.5) / S) ** 0.8)).exp() @ p.v
    ),
    "several bandwidths": lambda p: (
        ((-p.squares / S**2).exp() + 0.5 * (-p.squares / T**2).exp()) @ p.v
    ),
    "a scale for each feature": lambda p: (-(p.apart / p.w).square().sum(-1) / 2).exp() @ p.v,
    "weighted distance": lambda p: (-(p.apart @ p.L).square().sum(-1)).exp() @ p.v,
    "linear": lambda p: p.dots @ p.v,
    "polynomial": lambda p: (T * p.dots + C) ** 3 @ p.v,
    "exponential of a product": lambda p: (p.dots / S).exp() @ p.v,
    "hyperbolic tangent": lambda p: (T * p.dots + C).tanh() @ p.v,
    "cosine of an angle": lambda p: p.angles @ p.v,
    "periodic": lambda p: (
        (-2 * (math.pi * p.apart / T).sin().square().sum(-1) / S**2).exp() @ p.v
    ),
    "squared sine of a difference": lambda p: p.apart.sin().square().sum(-1) @ p.v,
    "product over groups of features": lambda p: (
        (-(p.apart[..., 0].square() / S**2 + p.apart[..., 1:].square().sum(-1) / T**2) / 2).exp()
        @ p.v
    ),
    "sum of kernels": lambda p: (p.gauss + p.dots) @ p.v,
    "Hellinger": lambda p: (
        (p.x.abs().sqrt()[:, None] - p.y.abs().sqrt()[None]).square().sum(-1) @ p.v
    ),
    "factors of rows and columns": lambda p: (
        (p.a[:, None] * p.b[None] * (-p.squares).exp()) @ p.v
    ),
    "softened forces": lambda p: (
        (-p.apart * (p.b[None] / (p.squares + C) ** 1.5)[..., None]).sum(1)
    ),
    "a weighted mean, mean shift": lambda p: p.gauss @ p.y / p.gauss.sum(1, keepdim=True),
    "a batch": lambda p: p.gauss @ p.v,
    "sum of rows": lambda p: p.gauss.sum(1),
    "sum of columns": lambda p: p.gauss.sum(0),
    "mean of rows": lambda p: p.gauss.mean(1),
    "log-sum-exp": lambda p: (-p.squares / C).logsumexp(1),
    "log of a density": lambda p: (
        (p.gauss.mean(1) / (2 * math.pi * S**2) ** 1.5).log()
    ),
    "smallest": lambda p: p.squares.amin(1),
    "place of the smallest": lambda p: p.squares.argmin(1),
    "largest": lambda p: p.squares.amax(1),
    "k smallest": lambda p: p.squares.topk(5, largest=False)[0],
    "places of the k smallest": lambda p: p.squares.topk(5, largest=False)[1],
    "k nearest by L1": lambda p: p.apart.abs().sum(-1).topk(5, largest=False)[1],
    "k nearest by angle": lambda p: p.angles.topk(5)[1],
    "softmax weights": lambda p: (-p.squares / (2 * S**2)).softmax(1) @ p.v,
    "mean discrepancy": lambda p: (
        p.gaussian(p.x, p.x).mean() + p.gaussian(p.y, p.y).mean() - 2 * p.gauss.mean()
    ),
    "Sinkhorn's step": lambda p: -C * ((p.g[None] - p.squares) / C).logsumexp(1),
    "gradient by points": by_torch,
    "a system": lambda p: torch.linalg.solve(
        p.gaussian(p.x, p.x) + C * torch.eye(len(p.x), dtype=p.x.dtype), p.x[:, 0]
    ),
}  # fmt: skip


def test_each_row_has_a_formula():
    assert ROWS.keys() == REFERENCES.keys() and len(ROWS) >= 40


@pytest.mark.few(60)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_its_formula(name):
    exact = REFERENCES[name](Pairs(drawn(torch.float64)))
    names = drawn(torch.float64)
    if "autograd" in ROWS[name]:
        names["x"].requires_grad_()
    modules = {"kl": kl, "torch": torch, "F": F, "math": math}
    result = eval(ROWS[name], modules | names | {"s": S, "t": T, "c": C})
    torch.testing.assert_close(result, exact, rtol=1e-7, atol=1e-7)
