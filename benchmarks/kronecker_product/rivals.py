"""Products with Kronecker products in plain torch, and by GPyTorch.

Every rival is ``f(x, factors)``, with the factors on the side of x that the problem says.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from benchmarks.kronecker_product.problems import Problem
from kernlib.families.kronecker_product import reference

MERGED = (16, 64)  # sizes up to which neighbours are made one factor, for cuBLAS


def rivals(problem: Problem) -> dict[str, Callable]:
    """What there is for a case."""
    axis = -1 if problem.side == "right" else -2
    found: dict[str, Callable] = {"shuffle": lambda x, fs: shuffle(x, fs, axis)}
    found["strided"] = lambda x, fs: reference.multiply(x, matrices(fs, axis), axis)
    for size in MERGED:
        found[f"merged to {size}"] = lambda x, fs, size=size: merged(x, fs, axis, size)
    if problem.section == "named":
        found["torch.compile"] = torch.compile(lambda x, fs: einsum(x, fs, axis), dynamic=False)
    if importlib.util.find_spec("linear_operator") and problem.side == "left":
        found["linear_operator"] = linear_operator
    return found


def matrices(factors, axis: int) -> list[torch.Tensor]:
    """Factors as they multiply rows."""
    return list(factors) if axis == -1 else [f.mT for f in factors]


def shuffle(x: torch.Tensor, factors, axis: int) -> torch.Tensor:
    """The last factor on contiguous runs, and its index to the front, factor after factor."""
    y = x if axis == -1 else x.mT
    for factor in reversed(matrices(factors, axis)):
        y = (y.reshape(y.shape[0], -1, factor.shape[0]) @ factor).mT.reshape(y.shape[0], -1)
    return y if axis == -1 else y.mT.contiguous()


def merged(x: torch.Tensor, factors, axis: int, size: int) -> torch.Tensor:
    """Batched products on strided views, of fewer and larger factors."""
    made: list[torch.Tensor] = []
    for factor in matrices(factors, axis):
        if made and max(a * b for a, b in zip(made[-1].shape, factor.shape, strict=True)) <= size:
            made[-1] = reference.kron(made[-1], factor)
        else:
            made.append(factor)
    return reference.multiply(x, made, axis)


def einsum(x: torch.Tensor, factors, axis: int) -> torch.Tensor:
    """All in one expression."""
    found = matrices(factors, axis)
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows, columns = letters[: len(found)], letters[len(found) : 2 * len(found)]
    pairs = ",".join(p + q for p, q in zip(rows, columns, strict=True))
    sizes = [f.shape[0] for f in found]
    if axis == -1:
        y = torch.einsum(f"z{rows},{pairs}->z{columns}", x.unflatten(-1, sizes), *found)
        return y.flatten(1)
    y = torch.einsum(f"{rows}z,{pairs}->{columns}z", x.unflatten(0, sizes), *found)
    return y.flatten(0, -2)


def linear_operator(x: torch.Tensor, factors) -> torch.Tensor:
    from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator

    return KroneckerProductLinearOperator(*map(DenseLinearOperator, factors)) @ x
