"""Operators of DTensors: each process computes with what it holds, where that makes a part of the
result or of a sum, and otherwise with the whole.

A family says which in ``SHARDINGS`` of its ``rules``: functions of an operator's arguments by name,
whose :class:`Choice`s may be combined, one for each dimension of the mesh.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

WHOLE = ("layout", "matrix", "transposed")  # lists of indices, which every process has whole
LEAST_TORCH = (2, 13)  # 2.8 returns numbers that no process has computed
_lock = RLock()  # of the two below
_operators: list[tuple[torch._ops.OpOverload, str, torch.library.Library]] = []
_is_registered = False


class Choice(NamedTuple):
    """Tensors by name that may be sharded together, each along a dimension, all of one size; and
    the results then, each sharded along a dimension, or with None a part of a sum."""

    inputs: dict[str, int]
    outputs: tuple[int | None, ...]


def follow(operator: torch._ops.OpOverload, family: str, library: torch.library.Library) -> None:
    """Have an operator of a family take DTensors, as soon as there are any."""
    with _lock:
        _operators.append((operator, family, library))
        if _is_registered:
            _register(*_operators[-1])


def notice(kind: type) -> None:
    """Register all operators for a class of tensors if that is torch's DTensor."""
    global _is_registered
    if _is_registered or kind.__name__ != "DTensor":
        return
    if TorchVersion(torch.__version__) < LEAST_TORCH:
        return
    with _lock:
        if not _is_registered:
            for entry in _operators:
                _register(*entry)
            _is_registered = True


def rules_of(family: str, name: str) -> dict:
    """A dict of a family's ``rules``, by names of operators; empty for a family without these."""
    module = f"{family}.rules"
    try:
        return getattr(import_module(module), name, {})
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return {}


def beside(t: torch.Tensor, other: Any) -> torch.Tensor:
    """A tensor that is the same in all processes, as a DTensor beside another one."""
    if not _is_distributed(other):
        return t
    from torch.distributed.tensor import DTensor, Replicate

    mesh = other.device_mesh
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def multiply_(t: torch.Tensor, factors: torch.Tensor) -> None:
    """``t.mul_(factors)``, for factors that are the same in all processes. Of a DTensor each of
    them multiplies what it has: torch 2.13 refuses it where a dimension of size 1 is sharded."""
    if _is_distributed(t):
        factors = beside(factors.expand(t.shape), t)
        factors, t = factors.redistribute(placements=t.placements).to_local(), t.to_local()
    t.mul_(factors)


def _register(operator: torch._ops.OpOverload, family: str, library: torch.library.Library) -> None:
    from torch.distributed.tensor import DTensor

    def compute(cls, function, types, args, kwargs):
        rule = rules_of(family, "SHARDINGS").get(operator._opname)
        return _compute(operator, rule, args, kwargs or {})

    library._register_torch_dispatch_rule(operator._opname, DTensor, compute)


def _compute(operator: torch._ops.OpOverload, rule, args: tuple, kwargs: dict) -> Any:
    arguments = operator._schema.arguments
    values = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            raise TypeError(f"{argument.name} takes no DTensors: leave it out, and copy the result")
    mesh = next(t.device_mesh for t in _leaves(values.values()) if _is_distributed(t))
    choices = [] if rule is None else rule(**values)
    chosen = [_chosen(choices, values, axis) for axis in range(mesh.ndim)]
    with torch.no_grad():
        local = {name: _local(name, value, mesh, chosen) for name, value in values.items()}
    result = operator(**local)
    if isinstance(result, torch.Tensor):
        return _wrapped(result, 0, mesh, chosen, values)
    return type(result)(_wrapped(t, place, mesh, chosen, values) for place, t in enumerate(result))


def _leaves(values) -> list:
    return [leaf for value in values for leaf in (value if isinstance(value, list) else [value])]


def _is_distributed(value: object) -> bool:
    return type(value).__name__ == "DTensor"


def _chosen(choices: list[Choice], values: dict, axis: int) -> Choice | None:
    """The first choice by which some tensor is sharded along an axis of the mesh already."""
    from torch.distributed.tensor import Shard

    for choice in choices:
        tensors = {name: values[name] for name in choice.inputs if values[name] is not None}
        if all(map(_is_distributed, tensors.values())) and any(
            t.placements[axis] == Shard(choice.inputs[name]) for name, t in tensors.items()
        ):
            return choice
    return None


def _local(name: str, value: Any, mesh, chosen: list) -> Any:
    """The local value with which a process computes for an argument. Raises TypeError for a plain
    tensor that is not declared the same in all processes."""
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(value, list):
        return [_local(name, item, mesh, chosen) for item in value]
    if _is_distributed(value):
        placements: list[Placement] = [
            Shard(choice.inputs[name]) if choice and name in choice.inputs else Replicate()
            for choice in chosen
        ]
        return value.redistribute(mesh, placements).to_local()
    if isinstance(value, torch.Tensor) and name not in WHOLE and value.dim():
        raise TypeError(
            f"{name} is a plain tensor beside DTensors: torch.distributed.tensor.distribute_tensor "
            "makes it one, and distribute_module those of a layer"
        )
    return value


def _wrapped(t: torch.Tensor, place: int, mesh, chosen: list, values: dict) -> DTensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements: list[Placement] = []
    shape = list(t.shape)
    for choice in chosen:
        dim = -1 if choice is None else choice.outputs[place]
        if choice is None:
            placements.append(Replicate())
        elif dim is None:
            placements.append(Partial())
        else:
            name, along = next((n, d) for n, d in choice.inputs.items() if values[n] is not None)
            placements.append(Shard(dim))
            shape[dim] = values[name].shape[along]
    like = torch.empty(shape, dtype=t.dtype, device="meta")
    return DTensor.from_local(
        t.contiguous(), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
