"""What products share of their arguments, whatever they multiply by: what can be wrong with the
parameters of their epilogues, said in the caller's words, and how they are cast and handed on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from kernlib.descriptors.base import Descriptor, refuse_argument
from kernlib.descriptors.epilogues import Product
from kernlib.errors import UnsupportedError
from kernlib.runtime.dtypes import KERNEL_TYPES, accumulator
from kernlib.runtime.numbers import check_host, check_kind, check_tensor, host_value, on_device
from kernlib.runtime.tensors import (
    check_layout,
    check_out_shape,
    is_itself,
    materialised,
    signature,
)

# Checks.


def check_names(descriptor: Descriptor, parameters: dict) -> None:
    """Each parameter of the epilogue is given, and nothing else. Raises TypeError for what is none
    of them, ValueError for one that is missing."""
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
    """Each parameter of the epilogue is given and fits a result of so many features; ``look`` at
    values in host memory. ``dtypes`` as of :func:`check_vector`, ``shape`` that of the result,
    where there may be summands. Raises ValueError and TypeError."""
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
    """A vector has a value for each feature of the result, and the dtype of x, which errors call
    one of ``dtypes``, if they are given. Raises ValueError and TypeError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a dense tensor of shape ({features},), got {type(value).__name__}"
        )
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
    """A summand broadcasts to the result's shape, and has the dtype of x, one of ``dtypes`` if they
    are given. Raises ValueError and TypeError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    check_layout(name, value)
    check_broadcast(shape, name, value)
    check_same_kind("x", x, name, value, dtypes)


def check_broadcast(shape: Sequence[int], name: str, value: torch.Tensor) -> None:
    """Raises ValueError for a tensor that does not broadcast to a shape."""
    behind = len(shape) - value.dim()
    if behind < 0 or any(
        [own not in (1, size) for own, size in zip(value.shape, shape[behind:], strict=True)]
    ):
        raise ValueError(f"{name} must broadcast to {tuple(shape)}, got {tuple(value.shape)}")


def check_same_kind(
    first: str,
    x: torch.Tensor,
    second: str,
    y: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Two tensors have one dtype, one of ``dtypes`` if they are given, and one device. Raises
    ValueError and TypeError."""
    for name, tensor in ((first, x), (second, y)) if dtypes else ():
        if tensor.dtype not in dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{name} must be one of {known}, got {tensor.dtype}")
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
        raise ValueError(f"{name} is on {value.device}, x on {x.device}")


def check_out(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], name: str = "x") -> None:
    """``out`` is what a call of x, which it calls ``name``, could return. Raises ValueError and
    TypeError."""
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
    """:func:`refuse_out_of_recorded` of a call whose gradient would be recorded, ``out`` or one of
    the values requiring one. Dynamo can trace it."""
    if out is not None and torch.is_grad_enabled():
        for value in (out, *values):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                refuse_out_of_recorded(out)


def written(out: torch.Tensor | None, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The result y of a call of x, copied to ``out`` where one is given. Raises ValueError and
    TypeError. Dynamo can trace it."""
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
    """Operands, of which the first says the device, and parameters as autocast has them for a
    linear layer: all but float64 in its dtype, or in ``dtype``."""
    x = operands[0]
    kind = x.device.type if isinstance(x, torch.Tensor) else "none"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return operands, parameters
    dtype = dtype or torch.get_autocast_dtype(kind)
    cast = {name: _cast(value, dtype) for name, value in parameters.items()}
    return tuple(_cast(operand, dtype) for operand in operands), cast


def _cast(value, dtype: torch.dtype):
    """Of parameters only the vectors: a tensor of shape () is a scalar."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value.to(dtype) if value.dtype in KERNEL_TYPES else value


def no_autocast(x: torch.Tensor):
    """Autocast has cast the operands already, and would take float32 sums from half types."""
    if torch._C._is_any_autocast_enabled() and x.device.type != "meta":
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


# Operands and parameters of a launch.


def folded(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of dimensions taken as one, 0 of a single entry; None where that takes a copy."""
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
    """The first address; a meta tensor's storage begins at 0."""
    return t.storage_offset() * t.element_size() if t.is_meta else t.data_ptr()


def tensors_of(parameters: dict) -> dict[str, torch.Tensor]:
    """The parameters that are tensors."""
    return {name: value for name, value in parameters.items() if isinstance(value, torch.Tensor)}


def apart_of(descriptor: Product, out, parameters: dict) -> dict[str, torch.Tensor]:
    """The parameters that are tensors and must share no memory with ``out``: all but a summand that
    is ``out`` itself, of which each element is read by who then writes it."""
    tensors = tensors_of(parameters)
    if out is None or not descriptor.summands:
        return tensors
    summands = [name for name in descriptor.summands if name in tensors]
    kept = [name for name in summands if is_itself(tensors[name], out)]
    return {name: value for name, value in tensors.items() if name not in kept}


def readable(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """Arguments that a kernel may read: the lazy negation of a view is not in its memory, and a
    zero tensor has none."""
    real = {name: materialised(value) for name, value in tensors_of(parameters).items()}
    tensors = (materialised(x) if isinstance(x, torch.Tensor) else x for x in operands)
    return tuple(tensors), parameters | real


def parameter_key(value):
    """Of a number nothing; of a tensor its signature, so that one without memory finds no plan."""
    return signature(value) if isinstance(value, torch.Tensor) else None


def parameters_of(plan, descriptor: Product, parameters: dict) -> tuple:
    """Vectors, a number and an address for each scalar, and tensors to keep until the launch, in
    the plan's dtype and on its device. The plan names ``vectors`` and ``scalars``. Summands are not
    among them."""
    vectors = [parameters[name].contiguous() for name in plan.vectors]
    if not plan.scalars:
        return vectors, (), ()
    numbers, kept = [0.0, 0] * len(plan.scalars), []
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
        kept.append(tensor)
    return vectors, numbers, kept


def parameter_ranges(plan, spans: Sequence[int], parameters: dict) -> list[tuple[int, int]]:
    """Addresses and lengths in bytes of the parameters that are tensors, as they were given: an
    ``out`` that shares memory with one is refused even where the kernel reads a copy. ``spans``
    are those of the vectors."""
    vectors = zip(plan.vectors, spans, strict=True)
    found = [(parameters[name].data_ptr(), length) for name, length in vectors]
    for name in plan.scalars:
        value = parameters[name]
        if isinstance(value, torch.Tensor):
            found.append((value.data_ptr(), value.element_size()))
    return found


# Parameters of an operator: names, those of the numbers first, numbers and tensors.


def for_operator(parameters: dict, device: torch.device | None = None) -> tuple[str, list, list]:
    """The parameters as operators of ``torch.library`` take them, tensors on ``device``, if it is
    given, and the names as one text with spaces, for torch.jit.trace takes no list of str."""
    tensors = tensors_of(parameters)
    numbers = {k: _number(k, v) for k, v in parameters.items() if k not in tensors}
    names, given = " ".join([*numbers, *tensors]), [*tensors.values()]
    if device is not None:
        # The copy of a host tensor is recorded too: a CUDA graph can leave it out, where the
        # operator itself would have to refuse a host tensor while it is captured.
        given = [v if v.device == device else v.to(device) for v in given]
    return names, [*numbers.values()], given


def _number(name: str, value) -> float:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return torch.sym_float(value)
    return host_value(name, value, 0)


def by_name(names: str, numbers, tensors) -> dict:
    """The parameters of :func:`for_operator`. AOTInductor hands over None for an empty list."""
    return dict(zip(names.split(), (*(numbers or ()), *(tensors or ())), strict=True))
