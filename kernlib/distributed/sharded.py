"""DTensors of rows, on a mesh of one dimension, as what the processes hold of them and back."""

from __future__ import annotations

from typing import Any

import torch

from kernlib.distributed.rows import Replica
from kernlib.runtime.tensors import is_of


def is_distributed(t: object) -> bool:
    """Whether this is a DTensor."""
    return isinstance(t, torch.Tensor) and is_of(t, "DTensor")


def locals_of(a, b, v) -> list[Any]:
    """The rows that this process holds of DTensors. Raises TypeError and ValueError that name the
    argument."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = a.device_mesh
    if mesh.ndim != 1:
        raise ValueError(f"a must be on a mesh of one dimension, got one of {mesh.ndim}")
    if a.placements != (Shard(0),):
        raise ValueError(f"a must be sharded along its rows, got {a.placements}")
    rows = [a.to_local()]
    for name, t in (("b", b), ("v", v)):
        if t is None or isinstance(t, Replica):
            rows.append(t)
            continue
        if not is_distributed(t):
            raise TypeError(f"{name} must be a DTensor as a is, got {type(t).__name__}")
        if t.device_mesh != mesh:
            raise ValueError(f"{name} must be on the mesh of a, {mesh}, got {t.device_mesh}")
        if t.placements == (Replicate(),):
            t = t.redistribute(mesh, [Shard(0)])
        if t.placements != (Shard(0),):
            raise ValueError(f"{name} must be sharded along rows or replicated: {t.placements}")
        rows.append(t.to_local())
    return rows


def distributed(result, mesh, rows: int):
    """What a call returned in each process, as DTensors of so many rows."""
    from torch.distributed.tensor import DTensor, Shard

    if isinstance(result, tuple):
        return tuple(distributed(t, mesh, rows) for t in result)
    shape = (rows, *result.shape[1:])
    like = torch.empty(shape, dtype=result.dtype, device="meta")
    options = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(result.contiguous(), mesh, [Shard(0)], **options)
