"""Callers' contents of a layout, checked: masks and lists of indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.runtime.tensors import as_backend_device, check_layout, refuse_transforms, stand_ins

ADVICE = "no layout can be made of; make it outside and pass it in"
NARROW = (torch.int8, torch.uint8, torch.int16, torch.int32)  # what int32 holds

Mask = torch.Tensor | Sequence
Indices = torch.Tensor | Sequence[int]


def checked_mask(
    mask: object, of_blocks: str = "Layout.from_block_mask(block_mask) is its layout"
) -> torch.Tensor:
    """A mask of bools with 2 or 3 dimensions, where it lies. Raises TypeError for what is neither a
    dense tensor nor nested lists of 0 and 1, ValueError for another number of dimensions.
    ``of_blocks`` says what to pass in place of a ``BlockMask`` of FlexAttention."""
    if type(mask).__name__ == "BlockMask":
        raise TypeError(f"mask must be a tensor or nested lists, got BlockMask; {of_blocks}")
    mask = as_tensor("mask", mask, "(RB, CB) or (heads, RB, CB)")
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise TypeError(f"mask must hold bools or ints, got {mask.dtype}; pass mask != 0")
    if mask.dim() not in (2, 3):
        raise ValueError(
            "mask must have shape (RB, CB) or (heads, RB, CB), an entry a block, got "
            f"{tuple(mask.shape)}"
        )
    if mask.dim() == 3 and mask.shape[0] == 0:
        raise ValueError(f"mask must have at least one head, got shape {tuple(mask.shape)}")
    return mask.detach().to(torch.bool)


def checked_indices(rows: Indices, cols: Indices, heads: Indices | None) -> dict[str, torch.Tensor]:
    """Lists of indices, of one length and on one device, as int32 or int64 of one dtype; no heads
    where there are none. Raises TypeError for what holds no ints, ValueError for other shapes and
    devices."""
    lists = {"rows": rows, "cols": cols} | ({} if heads is None else {"heads": heads})
    tensors = {name: as_tensor(name, value, "(blocks,)") for name, value in lists.items()}
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise TypeError(f"{name} must hold ints, got {tensor.dtype}")
        if tensor.dim() != 1 or tensor.shape != tensors[first].shape:
            raise ValueError(
                f"{name} must have one index for each block, as {first} has "
                f"{tuple(tensors[first].shape)}, got shape {tuple(tensor.shape)}"
            )
        if tensor.device != tensors[first].device:
            raise ValueError(
                f"{name} is on {tensor.device} and {first} on {tensors[first].device}; "
                "pass both on one device"
            )
    wide = any(tensor.dtype not in NARROW for tensor in tensors.values())
    dtype = torch.int64 if wide else torch.int32
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}


def as_tensor(name: str, value: object, shape: str) -> torch.Tensor:
    """A tensor made of an argument. Raises TypeError for what cannot be one."""
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value, dtype=None, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must be a tensor {shape} or nested lists, got {type(value).__name__}: "
                f"{error}"
            ) from None
        if value.numel() == 0 and value.dtype.is_floating_point:
            value = value.to(torch.int64)  # of empty lists torch makes floats
    check_layout(name, value)
    if not is_dynamo_compiling():  # which traces what transforms do
        refuse_transforms(ADVICE, **{name: value})
    return value


def checked_device(device: object) -> torch.device:
    """Raises TypeError for what is no device, such as a dtype, ValueError for a text that names
    none. A CUDA device without a number is the current one."""
    place = as_backend_device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def place_of(device: object, contents: object) -> torch.device:
    """Where a layout is to lie: as asked, else where the tensor of its contents does, else on
    torch's default device."""
    if device is not None:
        return checked_device(device)
    if isinstance(contents, torch.Tensor):
        return checked_device(contents.device)
    try:
        return checked_device(torch.get_default_device())
    except AttributeError:  # of torch 2.8, once a default was taken back
        return torch.device("cpu")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError for a tensor that is not on the layout's device."""
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} and the layout on {device}; use "
            f"layout.to({str(tensor.device)!r})"
        )


def check_source(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError for contents that neither the layout's device nor the CPU holds."""
    if tensor.device.type != "cpu" and tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} and the layout on {device}; pass it there or on the CPU"
        )


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether kernels read it where it lies."""
    return tensor.device.type == "cuda"


def refuse_traced(name: str) -> None:
    """Raises RuntimeError inside of a function for torch.compile."""
    if is_dynamo_compiling():
        raise RuntimeError(
            f"{name} does not work inside of a function for torch.compile: make the layout outside "
            "and pass it in, or make it by Layout(mask, block, capacity)"
        )


@contextmanager
def outside() -> Iterator[None]:
    """Leave inference mode, whose tensors could not be written later, and transforms of torch.func,
    which would wrap each new tensor."""
    active = torch._C._are_functorch_transforms_active()
    with torch.inference_mode(False), torch._C._DisableFuncTorch() if active else nullcontext():
        yield


def has_values(*tensors: torch.Tensor) -> bool:
    """Whether all tensors hold values: none is on meta, none is fake."""
    return not stand_ins(*tensors) and not any(t.is_meta for t in tensors)
