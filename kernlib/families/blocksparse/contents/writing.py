"""Tensors of a layout made and written: by torch where the host has the values, by kernels on a
GPU, without waiting for it."""

from __future__ import annotations

import torch

from kernlib.errors import CaptureError
from kernlib.families.blocksparse.contents import bits
from kernlib.families.blocksparse.contents.given import has_values, on_gpu
from kernlib.families.blocksparse.contents.sizes import NAMES, tensor_shapes
from kernlib.families.blocksparse.lowering.problem import Blocks

Tensors = tuple[torch.Tensor, ...]


def count_live(mask: torch.Tensor) -> int:
    """Blocks of a mask, which waits for its device. Raises ValueError for one without values."""
    if not has_values(mask):
        raise ValueError("capacity must be given where mask has no values (meta or fake tensors)")
    refuse_capture(mask.device, "counting the blocks of mask", "give capacity")
    return int(mask.count_nonzero())


def of_mask(mask: torch.Tensor, blocks: Blocks, device: torch.device) -> Tensors:
    """The tensors, on a device, of a mask (heads, rows, columns) of bools. Raises ValueError for a
    mask of the host with more blocks than the capacity."""
    if not has_values(mask) or device.type == "meta":
        return _empty_like(mask, blocks, device)
    if device.type == "cuda" and on_gpu(mask):
        tensors = empty(blocks, device)
        write_mask(tensors, _moved(mask, device), blocks)
        return tensors
    return tuple(t.to(device) for t in of_host(mask.cpu(), blocks))


def of_host(mask: torch.Tensor, blocks: Blocks, given: str = "mask has") -> Tensors:
    """The tensors of a mask on the CPU. An error begins with ``given``. Raises ValueError for more
    blocks than the capacity."""
    live = int(mask.count_nonzero())
    if live > blocks.capacity:
        raise ValueError(
            f"{given} {live} blocks, more than the layout's capacity of {blocks.capacity}; make a "
            "layout with a larger capacity"
        )
    return bits.encode(mask, blocks)


def of_indices(given: dict[str, torch.Tensor], blocks: Blocks, device: torch.device) -> Tensors:
    """The tensors, on a device, of lists of indices. Raises ValueError for duplicates, indices out
    of range and too many of them on the host."""
    lists = tuple(given.values())
    if not has_values(*lists) or device.type == "meta":
        return _empty_like(lists[0], blocks, device)
    if device.type == "cuda" and on_gpu(lists[0]):
        tensors = empty(blocks, device)
        write_indices(tensors, {name: _moved(t, device) for name, t in given.items()}, blocks)
        return tensors
    mask = marked({name: t.cpu() for name, t in given.items()}, blocks)
    return tuple(t.to(device) for t in of_host(mask, blocks, "rows and cols name"))


def marked(given: dict[str, torch.Tensor], blocks: Blocks) -> torch.Tensor:
    """The mask (heads, rows, columns) with the blocks of lists on the CPU. Raises ValueError for
    duplicates and indices out of range."""
    limits = {"rows": blocks.grid_rows, "cols": blocks.grid_cols, "heads": blocks.heads}
    at = torch.zeros_like(given["rows"], dtype=torch.int64)
    for name in ("heads", "rows", "cols"):
        if name not in given:
            continue
        wrong = (given[name] < 0) | (given[name] >= limits[name])
        if wrong.any():
            first = int(given[name][wrong][0])
            most = f"0 to {limits[name] - 1}" if limits[name] else "none, as the grid has no blocks"
            raise ValueError(f"{name} must be {most}, got {first}")
        at = at * limits[name] + given[name]
    shape = blocks.heads, blocks.grid_rows, blocks.grid_cols
    mask = torch.zeros(shape, dtype=torch.bool, device="cpu")
    mask.view(-1)[at] = True
    if int(mask.count_nonzero()) != at.numel():
        raise ValueError(
            "rows, cols and heads must name each block once, got "
            f"{at.numel() - int(mask.count_nonzero())} duplicates"
        )
    return mask


def empty(blocks: Blocks, device: torch.device) -> Tensors:
    """Tensors with unwritten values."""
    shapes = tensor_shapes(blocks)
    return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one dimension in the same memory that is no view: for a view Dynamo would guard
    the sizes of its base."""
    if not tensor._is_view() and tensor.dim() == 1:
        return tensor
    if not has_values(tensor):
        return tensor.view(-1)
    memory, count = tensor.untyped_storage(), tensor.numel()
    return tensor.new_empty(0).set_(memory, tensor.storage_offset(), (count,), (1,))


def _empty_like(given: torch.Tensor, blocks: Blocks, device: torch.device) -> Tensors:
    """The tensors without values: fake ones for a fake tensor."""
    shapes = tensor_shapes(blocks)
    return tuple(given.new_empty(shape, dtype=torch.int32, device=device) for shape in shapes)


def update_mask(tensors: Tensors, mask: torch.Tensor, blocks: Blocks) -> None:
    """Write the contents of a mask (heads, rows, columns), which lies with the tensors or on the
    CPU, in place. Nothing where there are no values."""
    if not has_values(mask, *tensors):
        return
    if on_gpu(mask):
        write_mask(tensors, mask, blocks)
    else:
        _refuse_capture_of_host(tensors)
        _copy(tensors, of_host(mask, blocks))


def update_indices(tensors: Tensors, given: dict[str, torch.Tensor], blocks: Blocks) -> None:
    """Write the contents of lists of indices in place, as :func:`update_mask` does."""
    if not has_values(*given.values(), *tensors):
        return
    if on_gpu(given["rows"]):
        write_indices(tensors, given, blocks)
    else:
        _refuse_capture_of_host(tensors)
        _copy(tensors, of_host(marked(given, blocks), blocks, "rows and cols name"))


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def _refuse_capture_of_host(tensors: Tensors) -> None:
    advice = "pass a tensor on the layout's device"
    refuse_capture(tensors[0].device, "copying contents from the host", advice)


def _copy(tensors: Tensors, new: Tensors) -> None:
    for old, source in zip(tensors, new, strict=True):
        old.copy_(source)


def counted(tensors: Tensors) -> list[int]:
    """The numbers of blocks that are stored and that were dropped. Waits for the device. Raises
    ValueError for a layout without contents."""
    counts = tensors[5]
    if not has_values(counts):
        raise ValueError("the layout has no contents here to count (meta or fake tensors)")
    refuse_capture(counts.device, "counting blocks", "count them before or after")
    # Not tolist(), which reads memory that transforms of torch 2.8 hide.
    return [int(count) for count in counts.cpu()]


def write_mask(tensors: Tensors, mask: torch.Tensor, blocks: Blocks) -> None:
    """The contents of a mask on the tensors' GPU, by kernels: what is too many is dropped."""
    from kernlib.families.blocksparse.contents import device  # layouts on CPUs do not load it

    device.write_mask(tensors, mask.contiguous(), blocks)
    torch.autograd.graph.increment_version(tensors)


def write_indices(tensors: Tensors, given: dict[str, torch.Tensor], blocks: Blocks) -> None:
    """The contents of lists of indices on the tensors' GPU, by kernels: what is too many, twice
    there or out of range is dropped."""
    from kernlib.families.blocksparse.contents import device

    device.write_indices(tensors, given, blocks)
    torch.autograd.graph.increment_version(tensors)


def refuse_capture(device: torch.device, what: str, advice: str) -> None:
    """Raises CaptureError while a CUDA graph is captured on a device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what} waits for the device, which cannot be while a CUDA graph is captured: {advice}"
        )


def named(tensors: Tensors) -> dict[str, torch.Tensor]:
    """By their names."""
    return dict(zip(NAMES, tensors, strict=True))
