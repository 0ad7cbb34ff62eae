"""Weights and a leading bias of float32 under autocast to half precision, which the plans of a
chain of two factors read as they are: rounded in a launch of the plan, and their gradients widened
in one, where autocast has a kernel and a step of autograd for each tensor and way.

A call has master weights if its first weight is wider than x; all weights and the bias are then.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.kronecker_sparse.chain.kind import HALVES, is_of_kind
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparseChain
from kernlib.families.kronecker_sparse.kernels.steps import cast
from kernlib.lowering.steps import Lowered
from kernlib.runtime import arguments
from kernlib.runtime.arguments import address_of
from kernlib.runtime.dtypes import KERNEL_TYPES

_FLOAT32 = torch.float32
_READ = *HALVES, _FLOAT32  # of x


def autocast(
    chain: KroneckerSparseChain, operands: tuple, parameters: dict
) -> tuple[tuple, dict, bool]:
    """:func:`kernlib.runtime.arguments.autocast`, but that master weights stay as they are; and
    whether there are any."""
    if not _are_taken(chain, operands, parameters):
        return *arguments.autocast(operands, parameters), False
    (x, *weights), bias = operands, bias_name(chain)
    rest = {name: value for name, value in parameters.items() if name != bias}
    (x,), values = arguments.autocast((x,), rest)
    if bias is not None:
        values = {name: values.get(name, parameters[name]) for name in parameters}
    return (x, *weights), values, True


def are_there(operands: tuple | list) -> bool:
    """Whether a call of tensors has master weights."""
    x, weight, *_ = operands
    return weight.dtype is _FLOAT32 and x.dtype in HALVES


def rounded(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """Operands and parameters as autocast would have them, differentiable."""
    (x, *weights), dtype = operands, operands[0].dtype
    values = {
        name: value.to(dtype) if _is_wide(value) and value.dim() else value
        for name, value in parameters.items()
    }
    return (x, *(weight.to(dtype) for weight in weights)), values


def stand_ins(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """New tensors of x's dtype in the place of master weights, each on its device, for code that
    reads no values."""
    if not are_there(operands):
        return operands, parameters
    x, *weights = operands
    values = {
        name: _like(value, x.dtype) if _is_wide(value) and value.dim() else value
        for name, value in parameters.items()
    }
    return (x, *(_like(weight, x.dtype) for weight in weights)), values


@lru_cache(maxsize=1024)
def bias_name(chain: KroneckerSparseChain) -> str | None:
    """The parameter of the Bias that the last factor's epilogues begin with, None without one."""
    epilogue = chain.factors[-1].epilogue
    return epilogue[0].parameter if epilogue and isinstance(epilogue[0], Bias) else None


def lower(
    lowered: Lowered,
    dtype: torch.dtype,
    masters: dict[str, torch.Tensor],
    gradients: dict[str, torch.Size] | None = None,
) -> Lowered:
    """Launches of ``dtype`` that read master weights and leave float32 ``gradients`` of these
    shapes, by the names that launches have for both."""
    read = {name: math.prod(t.shape) for name, t in masters.items()}
    written = {name: math.prod(shape) for name, shape in (gradients or {}).items()}
    is_aligned = all(address_of(t) % 16 == 0 for t in masters.values())
    return cast.lower(lowered, KERNEL_TYPES[dtype], read, written, is_aligned)


def _like(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.new_empty(t.shape, dtype=dtype)


def _is_wide(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is _FLOAT32


def _are_taken(chain: KroneckerSparseChain, operands: tuple, parameters: dict) -> bool:
    """Whether autocast is on, to half precision, and the plans of the chain read its weights."""
    x, *masters = operands
    if not isinstance(x, torch.Tensor) or not is_of_kind(chain):
        return False
    if not x.is_cuda and arguments.autocast_device(x.device) != "cuda":
        return False
    if not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") not in HALVES:
        return False
    bias = bias_name(chain)
    if bias is not None:
        masters.append(parameters.get(bias))
    place, is_grad_enabled = x.get_device(), torch.is_grad_enabled()
    for t in masters:
        if not isinstance(t, torch.Tensor) or t.dtype is not _FLOAT32:
            return False
        if t.get_device() != place or not t.dim() or not t.is_contiguous():
            return False
        if is_grad_enabled and t.is_inference():  # no backward pass may save these
            return False
    return x.dtype in _READ
