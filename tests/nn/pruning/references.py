"""Wanda and SparseGPT of one weight in float64, written from their papers: column by column and
without blocks of errors."""

from __future__ import annotations

import torch

DOUBLE = torch.float64


def wanda(weight: torch.Tensor, x: torch.Tensor, density: float, pattern=None) -> torch.Tensor:
    """The weight (R, C) pruned by ``|W| ||X_j||`` of the inputs (N, C), row by row."""
    weight, x = weight.to(DOUBLE), x.to(DOUBLE)
    scores = weight.abs() * x.square().sum(0).sqrt()
    result = torch.zeros_like(weight)
    for row in range(len(weight)):
        if pattern is None:
            order = scores[row].argsort(descending=True, stable=True)
            stays = order[: round(density * weight.shape[1])]
        else:
            stays = of_groups(scores[row], *pattern)
        result[row, stays] = weight[row, stays]
    return result


def of_groups(scores: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """The places of the n largest of each m numbers."""
    order = scores.view(-1, m).argsort(dim=1, descending=True, stable=True)[:, :n]
    return (order + torch.arange(0, len(scores), m)[:, None]).reshape(-1)


def sparsegpt(
    weight: torch.Tensor, x: torch.Tensor, density: float, pattern=None, block=128, dampening=0.01
) -> torch.Tensor:
    """The weight (R, C) pruned by algorithm 1 of SparseGPT for the inputs (N, C)."""
    weight, x = weight.to(DOUBLE).clone(), x.to(DOUBLE)
    rows, columns = weight.shape
    hessian = 2 * x.T @ x / len(x)
    dead = hessian.diagonal() == 0
    weight[:, dead] = 0
    hessian += torch.diag(dead.to(DOUBLE))
    hessian += dampening * hessian.diagonal().mean() * torch.eye(columns, dtype=DOUBLE)
    upper = torch.linalg.cholesky(hessian.inverse(), upper=True)
    diagonal = upper.diagonal()
    stays = torch.zeros(rows, columns, dtype=torch.bool)
    for j in range(columns):
        if pattern is not None and j % pattern[1] == 0:
            n, m = pattern
            scores = (weight[:, j : j + m] / diagonal[j : j + m]) ** 2
            for row in range(rows):
                stays[row, j + of_groups(scores[row], n, m)] = True
        if pattern is None and j % block == 0:
            end = min(j + block, columns)
            count = round(density * rows * end) - round(density * rows * j)
            scores = ((weight[:, j:end] / diagonal[j:end]) ** 2).reshape(-1)
            part = torch.zeros_like(scores, dtype=torch.bool)
            part[scores.argsort(descending=True, stable=True)[:count]] = True
            stays[:, j:end] = part.view(rows, end - j)
        dropped = torch.where(stays[:, j], 0, weight[:, j])
        weight[:, j:] -= torch.outer(dropped / diagonal[j], upper[j, j:])
        weight[:, j] *= stays[:, j]
    return weight


PRUNED = {"wanda": wanda, "sparsegpt": sparsegpt}
