"""Everything that can be wrong with a Kronecker-sparse call, said in the caller's words."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernlib.descriptors.kronecker_sparse import KroneckerSparse, KroneckerSparseChain
from kernlib.ops.hyperparameters import check_host, check_kind, check_tensor, host_value
from kernlib.ops.tensors import check_dense, check_memory, check_out_shape

KERNEL_TYPES = {  # the dtypes of the kernels, by the names that lowering knows
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
TYPES = (*KERNEL_TYPES, torch.float64)  # float64 is computed by torch


class Call(NamedTuple):
    """A checked call."""

    batch: int
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def check_call(descriptor: KroneckerSparse, x, weight, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_dense(("x", "weight"), x=x, weight=weight, out=out)
    shape = check_operands(descriptor.pattern, descriptor.batch_last, x, weight)
    check_parameters(descriptor, parameters, x, look=True)
    if out is not None:
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape) // descriptor.out_features, shape, x.dtype, x.device)


def check_operands(pattern: tuple, batch_last: bool, x, weight) -> tuple[int, ...]:
    """The output's shape. Raises ValueError and TypeError; sizes may be symbols."""
    _check_same_kind("x", x, "weight", weight)
    if tuple(weight.shape) != tuple(pattern):
        raise ValueError(
            f"weight must have shape {tuple(pattern)}, the pattern, got {tuple(weight.shape)}"
        )
    a, b, c, d = pattern
    if x.dim() == 0 or x.shape[0 if batch_last else -1] != a * c * d:
        expected = f"({a * c * d}, ...)" if batch_last else f"(..., {a * c * d})"
        raise ValueError(
            f"x must be {expected} for the pattern {tuple(pattern)}, got shape {tuple(x.shape)}"
        )
    return (a * b * d, *x.shape[1:]) if batch_last else (*x.shape[:-1], a * b * d)


def check_parameters(descriptor: KroneckerSparse, parameters: dict, x, look: bool) -> None:
    """Each parameter of the epilogue is given and fits; ``look`` at values in host memory. Raises
    ValueError and TypeError."""
    check_names(descriptor, parameters)
    for name, value in parameters.items():
        if name in descriptor.vectors:
            check_vector(descriptor.out_features, name, value, x)
        else:
            _check_scalar(descriptor, name, value, x, look)


def check_gradient(grad, x, pattern: tuple[int, ...], batch_last: bool) -> None:
    """The operands of a weight's gradient fit its pattern and each other. Raises ValueError and
    TypeError; sizes of the batch may be symbols."""
    check_dense(("grad", "x"), grad=grad, x=x)
    _check_same_kind("x", x, "grad", grad)
    a, b, c, d = pattern
    axis = 0 if batch_last else -1
    for name, tensor, wanted in (("grad", grad, a * b * d), ("x", x, a * c * d)):
        if tensor.dim() == 0 or tensor.shape[axis] != wanted:
            raise ValueError(
                f"{name} must have {wanted} features for the pattern {tuple(pattern)}, got shape "
                f"{tuple(tensor.shape)}"
            )
    batches = [t.shape[1:] if batch_last else t.shape[:-1] for t in (grad, x)]
    if batches[0] != batches[1]:
        raise ValueError(
            f"grad and x must have one batch, got {tuple(grad.shape)} and {tuple(x.shape)}"
        )


def _check_same_kind(first: str, x: torch.Tensor, second: str, y: torch.Tensor) -> None:
    for name, tensor in ((first, x), (second, y)):
        if tensor.dtype not in TYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
            raise TypeError(f"{name} must be one of {known}, got {tensor.dtype}")
    if x.dtype != y.dtype:
        raise TypeError(f"{first} and {second} must have one dtype, got {x.dtype} and {y.dtype}")
    if x.device != y.device:
        raise ValueError(
            f"{first} and {second} must be on one device, got {x.device} and {y.device}"
        )


def check_names(descriptor: KroneckerSparse | KroneckerSparseChain, parameters: dict) -> None:
    """Each parameter of the epilogue is given, and nothing else. Raises TypeError for what is none
    of them, ValueError for one that is missing."""
    needed = descriptor.parameters
    for name in parameters:
        if name not in needed:
            known = ", ".join(needed) or "none"
            raise TypeError(f"{name} is no argument of {descriptor.describe()}; it takes {known}")
    missing = [name for name in needed if name not in parameters]
    if missing:
        raise ValueError(f"{descriptor.describe()} needs {', '.join(missing)}")


def check_weights(descriptor: KroneckerSparse | KroneckerSparseChain, weights: tuple) -> None:
    """One weight a factor. Raises TypeError."""
    count = len(descriptor.factors)
    if len(weights) != count:
        wanted = "one weight" if count == 1 else f"{count} weights, one a factor in its order"
        raise TypeError(f"{descriptor.describe()} takes x and {wanted}, got {len(weights)}")


def check_vector(features: int, name: str, value, x: torch.Tensor) -> None:
    """A vector has a value for each output feature. Raises ValueError and TypeError."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor of shape ({features},), got {type(value).__name__}"
        )
    if value.dim() != 1 or value.shape[0] != features:
        raise ValueError(f"{name} must have shape ({features},), got {tuple(value.shape)}")
    _check_same_kind("x", x, name, value)


def _check_scalar(descriptor: KroneckerSparse, name: str, value, x, look: bool) -> None:
    if not look and isinstance(value, (torch.SymInt, torch.SymFloat)):
        return
    number = host_value(name, value, 0)
    if number is not None:
        check_host(name, number, descriptor.positive)
        return
    if look and not torch._C._functorch.is_functorch_wrapped_tensor(value):
        check_tensor(name, value, descriptor.positive, dimensions=0)
    else:
        check_kind(name, value, 0)
    if value.device != x.device and value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}, x on {x.device}")


def check_out(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """``out`` is what a call of x could return. Raises ValueError and TypeError."""
    check_out_shape(out, shape)
    if out.device != x.device:
        raise ValueError(f"out must be on the device of x, {x.device}, got {out.device}")
    if out.dtype != x.dtype:
        raise TypeError(f"out must be {x.dtype} as x is, got {out.dtype}")


def refuse_out_of_recorded(out) -> None:
    """Raises RuntimeError for an ``out`` of a call whose gradient is recorded."""
    if out is not None:
        raise RuntimeError(
            "out takes no result whose gradient is recorded: leave it out, detach the inputs, or "
            "call under torch.no_grad()"
        )
