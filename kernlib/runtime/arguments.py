"""What families of products share of their arguments: the checks of the parameters of epilogues,
with errors in the caller's words, and how these parameters are cast and handed on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from kernlib.descriptors.base import Descriptor, refuse_argument
from kernlib.descriptors.epilogues import Product
from kernlib.errors import UnsupportedError
from kernlib.runtime import rehearsal
from kernlib.runtime.dtypes import KERNEL_TYPES, accumulator
from kernlib.runtime.numbers import check_host, check_kind, check_tensor, host_value, on_device
from kernlib.runtime.tensors import (
    check_layout,
    check_out_shape,
    is_itself,
    materialised,
    refuse_other,
    signature,
)

# Checks.


def check_names(descriptor: Descriptor, parameters: dict) -> None:
    """Each parameter of the epilogue is given, and nothing else. Raises TypeError for a name that
    is none of them, ValueError for one that is missing."""
    needed = descriptor.parameters
    for name in parameters:
        if name not in needed:
            refuse_argument(descriptor, name, needed)
    missing = [name for name in needed if name not in parameters]
    if missing:
        needed = ", ".join(missing)
        raise ValueError(f"{descriptor.describe()} needs {needed}: {descriptor.call}")


def check_parameters(
    descriptor: Product,
    features: int,
    parameters: dict,
    x: torch.Tensor,
    look: bool,
    dtypes: tuple[torch.dtype, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Each parameter of the epilogue is given and fits a result of so many features. ``look`` says
    whether to check values that are in host memory. ``dtypes`` are those of :func:`check_vector`.
    ``shape`` is that of the result, where there may be summands. Raises ValueError and
    TypeError."""
    check_names(descriptor, parameters)
    for name, value in parameters.items():
        if name in descriptor.vectors:
            check_vector(features, name, value, x, dtypes)
        elif name in descriptor.summands:
            check_summand(shape, name, value, x, dtypes)
        else:
            _check_scalar(descriptor, name, value, x, look)


def check_vector(
    features: int,
    name: str,
    value,
    x: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """A vector has one value for each feature of the result, and the dtype and device of x. If
    ``dtypes`` are given, the dtype must be one of them. Raises ValueError and TypeError."""
    if not isinstance(value, torch.Tensor):
        refuse_other(name, value, f"a dense tensor of shape ({features},)")
    check_layout(name, value)
    if value.dim() != 1 or value.shape[0] != features:
        raise ValueError(f"{name} must have shape ({features},), got {tuple(value.shape)}")
    check_same_kind("x", x, name, value, dtypes)


def check_summand(
    shape: tuple[int, ...],
    name: str,
    value,
    x: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """A summand broadcasts to the result's shape, and has the dtype and device of x. If ``dtypes``
    are given, the dtype must be one of them. Raises ValueError and TypeError."""
    if not isinstance(value, torch.Tensor):
        refuse_other(name, value)
    check_layout(name, value)
    check_broadcast(shape, name, value)
    check_same_kind("x", x, name, value, dtypes)


def check_broadcast(shape: Sequence[int], name: str, value: torch.Tensor) -> None:
    """Raises ValueError for a tensor that does not broadcast to a shape."""
    behind = len(shape) - value.dim()
    if behind < 0 or any(
        [length not in (1, size) for length, size in zip(value.shape, shape[behind:], strict=True)]
    ):
        raise ValueError(f"{name} must broadcast to {tuple(shape)}, got {tuple(value.shape)}")


def check_same_kind(
    first: str,
    x: torch.Tensor,
    second: str,
    y: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Two tensors have the same dtype, which is one of ``dtypes`` if these are given, and the same
    device. Errors call the tensors ``first`` and ``second``. Raises ValueError and TypeError."""
    for name, tensor in ((first, x), (second, y)) if dtypes else ():
        if tensor.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{name} must be one of {names}, got {tensor.dtype}")
    if x.dtype != y.dtype:
        raise TypeError(f"{first} and {second} must have one dtype, got {x.dtype} and {y.dtype}")
    if x.device != y.device:
        raise ValueError(
            f"{first} and {second} must be on one device, got {x.device} and {y.device}"
        )


def _check_scalar(descriptor: Product, name: str, value, x: torch.Tensor, look: bool) -> None:
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
        raise ValueError(f"{name} is on {value.device}, x on {x.device}: move it there")


def check_out(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], name: str = "x") -> None:
    """``out`` has this shape, and the dtype and device of x, which errors call ``name``. Raises
    ValueError and TypeError."""
    check_out_shape(out, shape)
    if out.device != x.device:
        raise ValueError(f"out must be on the device of {name}, {x.device}, got {out.device}")
    if out.dtype != x.dtype:
        raise TypeError(f"out must be {x.dtype} as {name} is, got {out.dtype}")


def refuse_out_of_recorded(out) -> None:
    """Raises RuntimeError for an ``out`` of a call whose gradient is recorded."""
    if out is not None:
        raise RuntimeError(
            "out takes no result whose gradient is recorded: leave it out, detach the inputs, or "
            "call under torch.no_grad()"
        )


def refuse_recorded_out(out, *values) -> None:
    """:func:`refuse_out_of_recorded`, for a call whose gradient would be recorded because ``out``
    or one of the values requires one. Dynamo can trace it."""
    if out is not None and torch.is_grad_enabled():
        for value in (out, *values):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                refuse_out_of_recorded(out)


def written(out: torch.Tensor | None, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The result y of a call with x, or ``out`` if it is given, to which y is copied. Raises
    ValueError and TypeError. Dynamo can trace it."""
    if out is None:
        return y
    check_out(out, x, y.shape)
    return out.copy_(y)


def check_device(device: torch.device) -> None:
    """Raises UnsupportedError for devices that have no backend."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedError(
            f"kernlib computes on CUDA and CPU tensors, x is on {device}; move it to one of them"
        )


# Autocast and gradients.


def autocast(operands: tuple, parameters: dict, dtype: torch.dtype | None = None) -> tuple:
    """Operands and parameters as autocast casts those of a linear layer: tensors of all dtypes but
    float64 to autocast's dtype, or to ``dtype`` if it is given. The first operand's device says
    whether autocast is on."""
    x = operands[0]
    kind = autocast_device(x.device) if isinstance(x, torch.Tensor) else "none"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return operands, parameters
    dtype = dtype or torch.get_autocast_dtype(kind)
    cast = {name: _cast(value, dtype) for name, value in parameters.items()}
    return tuple(_cast(operand, dtype) for operand in operands), cast


def autocast_device(device: torch.device) -> str:
    """The type of device whose autocast a call follows: in a rehearsal that of a GPU."""
    return "cuda" if rehearsal.on_gpu(device) else device.type


def _cast(value, dtype: torch.dtype):
    """A tensor with dimensions, cast. Numbers, and tensors of shape (), which are scalars, stay as
    they are."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value.to(dtype) if value.dtype in KERNEL_TYPES else value


def no_autocast(x: torch.Tensor):
    """A context without autocast. The operands have been cast already, and autocast would round the
    float32 sums of half types."""
    if torch._C._is_any_autocast_enabled() and x.device.type != "meta":
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


# Operands and parameters of a launch.


def folded(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several dimensions that are taken as one: 0 if there is a single entry, None if
    they cannot be taken as one without a copy."""
    inner, reach = 0, None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if reach is None:
            inner = stride
        elif stride != reach:
            return None
        reach = stride * size
    return inner


def address_of(t: torch.Tensor) -> int:
    """The address of the first element. The storage of a meta tensor counts as beginning at 0."""
    return t.storage_offset() * t.element_size() if t.is_meta else t.data_ptr()


def tensors_of(parameters: dict) -> dict[str, torch.Tensor]:
    """The parameters that are tensors."""
    return {name: value for name, value in parameters.items() if isinstance(value, torch.Tensor)}


def apart_of(descriptor: Product, out, parameters: dict) -> dict[str, torch.Tensor]:
    """The parameters that are tensors and must not share memory with ``out``. A summand that is
    ``out`` itself may: whoever reads one of its elements then writes that element."""
    tensors = tensors_of(parameters)
    if out is None or not descriptor.summands:
        return tensors
    summands = [name for name in descriptor.summands if name in tensors]
    in_place = [name for name in summands if is_itself(tensors[name], out)]
    return {name: value for name, value in tensors.items() if name not in in_place}


def readable(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """Arguments that a kernel may read. Lazy tensors are copied: the memory of a lazily negated
    view does not hold its values, and a zero tensor has no memory."""
    real = {name: materialised(value) for name, value in tensors_of(parameters).items()}
    tensors = (materialised(x) if isinstance(x, torch.Tensor) else x for x in operands)
    return tuple(tensors), parameters | real


def parameter_key(value):
    """A parameter's part of a plan's key: nothing for a number, its signature for a tensor, so that
    a tensor without memory finds no plan."""
    return signature(value) if isinstance(value, torch.Tensor) else None


def parameters_of(plan, descriptor: Product, parameters: dict) -> tuple:
    """What a launch takes of the parameters: the vectors; a number and an address for each scalar,
    of which one counts; and tensors to keep until the launch. Scalars that are tensors are
    converted to the arithmetic's dtype and the plan's device. The plan names ``vectors`` and
    ``scalars``; summands are not among them."""
    vectors = [parameters[name].contiguous() for name in plan.vectors]
    if not plan.scalars:
        return vectors, (), ()
    numbers, converted = [0.0, 0] * len(plan.scalars), []
    for index, name in enumerate(plan.scalars):
        value = parameters[name]
        number = host_value(name, value, 0)
        if number is not None:
            if not number > 0:
                check_host(name, number, descriptor.positive)
            numbers[2 * index] = number
            continue
        if value.device.type == "cpu":
            check_tensor(name, value, descriptor.positive, dimensions=0)
        tensor = on_device(name, value, plan.device, accumulator(plan.dtype))
        numbers[2 * index + 1] = tensor.data_ptr()
        converted.append(tensor)
    return vectors, numbers, converted


def parameter_ranges(plan, spans: Sequence[int], parameters: dict) -> list[tuple[int, int]]:
    """Addresses and lengths in bytes of the parameters that are tensors, as the caller gave them:
    an ``out`` that shares memory with one is refused even where the kernel reads a copy. ``spans``
    are the lengths of the vectors."""
    vectors = zip(plan.vectors, spans, strict=True)
    ranges = [(parameters[name].data_ptr(), length) for name, length in vectors]
    for name in plan.scalars:
        value = parameters[name]
        if isinstance(value, torch.Tensor):
            ranges.append((value.data_ptr(), value.element_size()))
    return ranges
