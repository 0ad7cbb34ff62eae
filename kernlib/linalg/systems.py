"""A kernel system, in checked arguments, as it is solved by one process or by several."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.linalg.nystrom import OF_FEATURES


class Request(NamedTuple):
    """A system in checked arguments: targets are (N, C), and ``mu`` is the regularization, a number
    or one for each point, whose mean is ``mean``."""

    descriptor: Pairwise
    x: torch.Tensor
    y: torch.Tensor
    mu: float | torch.Tensor
    mean: float
    rank: int | None
    limits: tuple[float, int, int]
    generator: torch.Generator | None
    hyperparameters: dict


def default_rank(count: int) -> int:
    """Of the preconditioner of so many points."""
    return min(count, math.ceil(2 * math.sqrt(count)))


def widened(values: dict) -> dict:
    """Hyperparameters for points in float64."""
    mapped = {name: values[name] for name in OF_FEATURES if values.get(name) is not None}
    return values | {name: value.double() for name, value in mapped.items()}


def shifted(product: torch.Tensor, v: torch.Tensor, mu: float | torch.Tensor) -> torch.Tensor:
    """A product with K, plus the regularization's part."""
    if isinstance(mu, torch.Tensor):
        return product.addcmul_(mu.to(v.dtype)[:, None], v)
    return product.add_(v, alpha=mu)
