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
X = {"x": ("row", "feature"), "y": ("col", "feature")}  # axes of the page's formulas


def drawn(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    x, y, lower = draw(61, 3), draw(83, 3), draw(3, 3)
    named = {"x": x, "y": y, "v": draw(83, 2), "a": draw(61), "b": draw(83), "g": draw(83)}
    named |= {"L": lower, "w": draw(3).abs() + 0.5, "e": draw(61, 2)}
    named |= {"s_i": draw(61).abs() + 0.5, "t_j": draw(83).abs() + 0.5}
    labels = {"k_i": torch.arange(61) % 3, "l_j": torch.arange(83) % 4}
    return named | labels | {"u": draw(61, 4), "z": draw(83, 4)}


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
        self.both = self.s_i[:, None] ** 2 + self.t_j**2
        self.xs, self.ys = self.x[:, None].abs(), self.y.abs()
        self.lines = self.a[:, None] - self.b
        self.places = torch.arange(61)[:, None] - torch.arange(83)
        self.same = self.k_i[:, None] == self.l_j

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
    "a bandwidth for each row": lambda p: (
        (-p.squares / (2 * p.s_i[:, None] ** 2)).exp() @ p.v
    ),
    "a bandwidth for each row and column": lambda p: (
        (-p.squares / (p.s_i[:, None] * p.t_j)).exp() @ p.v
    ),
    "non-stationary (Gibbs)": lambda p: (
        ((2 * p.s_i[:, None] * p.t_j / p.both).sqrt() * (-p.squares / p.both).exp()) @ p.v
    ),
    "product of kernels": lambda p: (
        (-p.apart[..., 0].square() / (2 * S**2) - p.apart[..., 1:].abs().sum(-1) / T).exp() @ p.v
    ),
    "sum of kernels in one pass": lambda p: (
        (p.gauss + 0.5 * p.dots**2) @ p.v
    ),
    "a weighted sum of kernels": lambda p: (
        (0.3 * p.gauss + 1 / (1 + p.squares / T**2)) @ p.v
    ),
    "points and other vectors in one score": lambda p: (
        ((-p.squares / C).exp() * (p.u @ p.z.T)) @ p.v
    ),
    "varifolds": lambda p: (
        ((-p.squares / C).exp() * (p.u @ p.z.T) ** 2) @ p.b
    ),
    "a weight for each feature": lambda p: (
        (-(p.w * p.apart.square()).sum(-1)).exp() @ p.v
    ),
    "spectral mixture": lambda p: (
        ((-p.squares / 2).exp() * (2 * math.pi * (p.apart @ p.w)).cos()) @ p.v
    ),
    "a period for each feature": lambda p: (
        (-(math.pi * p.apart / p.w).sin().square().sum(-1)).exp() @ p.v
    ),
    "an offset for each column": lambda p: (
        (p.dots + p.b) ** 2 @ p.v
    ),
    "a cosine without normalized points": lambda p: (
        p.angles @ p.v
    ),
    "chi-squared": lambda p: (
        ((p.xs - p.ys).square() / (p.xs + p.ys)).sum(-1) @ p.v
    ),
    "histogram intersection": lambda p: (
        torch.minimum(p.x[:, None], p.y).sum(-1) @ p.v
    ),
    "Canberra": lambda p: (
        (p.apart.abs() / (p.xs + p.ys)).sum(-1) @ p.v
    ),
    "Kullback and Leibler": lambda p: (
        (p.xs * (p.xs / p.ys).log()).sum(-1) @ p.v
    ),
    "IfElse": lambda p: (
        torch.where(p.apart >= 0, p.x[:, None], 2 * p.y).sum(-1) @ p.v
    ),
    "Step": lambda p: (
        (p.lines >= 0).double().sum(1)
    ),
    "ReLU": lambda p: (
        p.lines.relu().sum(1)
    ),
    "Clamp": lambda p: (
        p.lines.clamp(-1, 1).sum(1)
    ),
    "Mod": lambda p: (
        (p.lines % S).sum(1)
    ),
    "Round": lambda p: (
        p.lines.round(decimals=1).sum(1)
    ),
    "Sign": lambda p: (
        p.lines.sign().sum(1)
    ),
    "SinXDivX": lambda p: (
        (p.far.sin() / p.far) @ p.v
    ),
    "XLogX": lambda p: (
        p.squares.xlogy(p.squares) @ p.v
    ),
    "Rsqrt": lambda p: (
        p.squares.rsqrt() @ p.v
    ),
    "a window of places": lambda p: (
        ((p.places.abs() <= 4) * (-p.squares / C).exp()).sum(1)
    ),
    "pairs of one label": lambda p: (
        (p.same * (-p.squares / C).exp()).sum(1)
    ),
    "a potential for each column": lambda p: (
        (p.g - p.squares / C).logsumexp(1)
    ),
    "a mixture of Gaussians": lambda p: (
        (p.g - p.squares / (2 * p.t_j**2) - 3 * p.t_j.log()).logsumexp(1)
    ),
    "a power diagram": lambda p: (
        (p.squares - p.b).argmin(1)
    ),
    "smallest of scaled distances": lambda p: (
        (p.squares / (p.s_i[:, None] * p.t_j)).amin(1)
    ),
    "largest of weighted products": lambda p: (
        (p.dots * p.b).amax(1)
    ),
    "k nearest of another label": lambda p: (
        torch.where(p.same, torch.inf, p.squares).topk(5, largest=False)[1]
    ),
    "gradient by each bandwidth": lambda p: (
        p.a * (((-p.squares / (2 * p.s_i[:, None] ** 2)).exp() * p.squares) @ p.b) / p.s_i**3
    ),
}  # fmt: skip


def test_each_row_has_a_formula():
    assert ROWS.keys() == REFERENCES.keys() and len(ROWS) >= 80


@pytest.mark.few(60)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_its_formula(name):
    exact = REFERENCES[name](Pairs(drawn(torch.float64)))
    names = drawn(torch.float64)
    if "autograd" in ROWS[name]:
        names["x"].requires_grad_()
        names["s_i"].requires_grad_()
    modules = {"kl": kl, "torch": torch, "F": F, "math": math}
    result = eval(ROWS[name], modules | names | {"s": S, "t": T, "c": C, "X": X})
    torch.testing.assert_close(result, exact, rtol=1e-7, atol=1e-7)
