"""GPUs that exist only by name, whose Kronecker products are computed by the text of their kernels,
on the host: from ``run_kernel`` to the last store."""

from __future__ import annotations

import math
from pathlib import Path

import torch

import kernlib as kl
from kernlib.families.kronecker_product import operation, plans
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.runtime import products
from tests.support import fakes
from tests.support.emulation import gpus


def install(monkeypatch, folder: Path) -> fakes.Gpus:
    """Put the GPUs in place; ``specs`` of what is returned are those that were launched."""
    return gpus.install(monkeypatch, folder, operation, products, plans)


def group(monkeypatch, kernel, groups: tuple) -> None:
    """Let a kernel have these groups of factors."""
    by_time = grouping.groups

    def chosen(one, *rest):
        return groups if one is kernel else by_time(one, *rest)

    monkeypatch.setattr(grouping, "groups", chosen)


def operands(shapes, rows: int, side: str, dtype, batch=()) -> list[torch.Tensor]:
    """x and the factors, which leave the size of a number as it is."""
    wide = math.prod(shape[side == "left"] for shape in shapes)
    x = torch.randn(*batch, *((rows, wide) if side == "right" else (wide, rows)))
    factors = [torch.randn(*batch, *shape) / shape[side == "left"] ** 0.5 for shape in shapes]
    return [t.to(dtype) for t in (x, *factors)]


def run(descriptor, *tensors, **arguments) -> torch.Tensor:
    """What a GPU computes of tensors of the host, on the host."""
    given = {name: gpus.gpu(value) for name, value in arguments.items()}
    return gpus.host(kl.run_kernel(descriptor, *map(gpus.gpu, tensors), **given))


def kinds(made: fakes.Gpus) -> list[str]:
    """Of the kernels that were launched."""
    return [spec.description.split()[1] for spec in made.specs]
