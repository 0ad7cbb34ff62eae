"""Statistics of a layer's inputs."""

from __future__ import annotations

import torch

from kernlib.nn.pruning.targets import Target
from kernlib.runtime.precision import is_rounded_on_cpu, rounds, without_autocast


def computed_in(weight: torch.Tensor) -> torch.dtype:
    """The dtype of computations of a weight: float32 at least, float64 where torch may round
    products of float32."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    like = torch.empty(0, dtype=dtype, device=weight.device)
    on_cpu = weight.device.type == "cpu" and dtype == torch.float32 and is_rounded_on_cpu()
    return torch.float64 if rounds(like) or on_cpu else dtype


class Norms:
    """``||X_j||_2`` of each input feature j, over all rows of all batches. Sums of squares are in
    float32 within a batch, in float64 over batches where the device has it."""

    def __init__(self, target: Target):
        columns, weight = target.weight.shape[1], target.weight
        self.rows = 0
        self._dtype = computed_in(weight)
        total = torch.float32 if weight.device.type == "mps" else torch.float64
        self._squares = torch.zeros(columns, dtype=total, device=weight.device)

    def add(self, x: torch.Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1])
        self.rows += len(x)
        self._squares += x.to(self._dtype).square().sum(0)

    def norms(self) -> torch.Tensor:
        """(in_features,)"""
        return self._squares.sqrt().to(self._dtype)


class Hessian:
    """``2 X^T X / rows`` of the rows of all batches, (in_features, in_features), as a running mean
    in float32 at least."""

    def __init__(self, target: Target):
        columns, weight = target.weight.shape[1], target.weight
        self.rows = 0
        dtype = computed_in(weight)
        self.matrix = torch.zeros(columns, columns, dtype=dtype, device=weight.device)

    def add(self, x: torch.Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1])
        if not len(x):
            return
        former, self.rows = self.rows, self.rows + len(x)
        x = x.to(self.matrix.dtype)
        with without_autocast(x.device):
            self.matrix.addmm_(x.mT, x, beta=former / self.rows, alpha=2 / self.rows)
