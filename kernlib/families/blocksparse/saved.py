"""States of layouts, as they are saved and loaded: whatever bytes they hold, nothing reads memory
by them before they have been looked at.

Every loader comes through :func:`loaded`: ``Layout.from_state`` and pickles. It makes the tensors
anew from the stored bits and compares the state's with them, so that no loaded layout leads a
kernel out of the tensors."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping

import torch

from kernlib.descriptors.base import shown
from kernlib.families.blocksparse.contents import bits, writing
from kernlib.families.blocksparse.contents.given import has_values
from kernlib.families.blocksparse.contents.sizes import (
    BLOCKS,
    MOST,
    NAMES,
    blocks_of,
    is_int,
    layout_text,
    parse_layout,
    tensor_shapes,
)
from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.runtime.tensors import check_dense, overlaps_itself, span

VERSION = 1  # of Layout.state()'s header
FIELDS = ("version", "block", "grid", "heads", "capacity", "checksum")


def header_of(text: str, tensors: Mapping[str, torch.Tensor]) -> dict:
    """The plain values of a layout's state. Waits for the tensors' device. Raises ValueError for
    tensors without values."""
    if not has_values(*tensors.values()):
        raise ValueError("the layout has no contents here to save (meta or fake tensors)")
    writing.refuse_capture(tensors["counts"].device, "a checksum", "take the state before or after")
    block, grid, heads, capacity = parse_layout(text)
    header = {"version": VERSION, "block": [*block], "grid": [*grid], "heads": heads}
    return {**header, "capacity": capacity, "checksum": checksum(text, tensors)}


def checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """The CRC-32 of version, text and the tensors' bytes, in the order of ``NAMES``."""
    crc = zlib.crc32(f"{VERSION} {text}".encode())
    for name in NAMES:
        data = tensors[name].detach().cpu().contiguous()
        if data.numel():
            size = data.numel() * data.element_size()
            crc = zlib.crc32((ctypes.c_char * size).from_address(data.data_ptr()), crc)
    return crc


def loaded(
    header: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Text and tensors of the layout of a state, sharing nothing with it. Raises ValueError that
    names what is wrong, TypeError for what is no mapping or dense tensor."""
    block, grid, heads, capacity = _checked_header(header)
    blocks, text = (
        blocks_of(block, grid, heads, capacity),
        layout_text(block, grid, heads, capacity),
    )
    _check_tensors(tensors, blocks)
    if checksum(text, tensors) != header["checksum"]:
        raise ValueError(
            "checksum of the header is not that of its values and tensors: the state was damaged, "
            "or put together of parts; make the layout again of its mask"
        )
    return text, _made(tensors, blocks)


def _checked_header(header: Mapping[str, object]) -> tuple[tuple, tuple, int | None, int]:
    """Block, grid, heads and capacity. Raises ValueError, and TypeError for what is no mapping."""
    if not isinstance(header, Mapping):
        raise TypeError(
            f"header must be a dict, the first of what Layout.state() gives, got "
            f"{type(header).__name__}"
        )
    missing = [name for name in FIELDS if name not in header]
    if missing:
        raise ValueError(f"header of a Layout lacks {', '.join(missing)}")
    version = header["version"]
    if not is_int(version) or version != VERSION:
        raise ValueError(
            f"header is of version {version!r}, this kernlib reads version {VERSION}: make the "
            "layout again of its mask"
        )
    block, grid = _pair("block", header["block"]), _pair("grid", header["grid"])
    if not all(size in BLOCKS for size in block):
        raise ValueError(f"block must be two of {', '.join(map(str, BLOCKS))}, got {block}")
    heads = header["heads"]
    if heads is not None:
        heads = _number("heads", heads, 1)
    if max(1, grid[0]) * max(1, grid[1]) * (heads or 1) > MOST:
        raise ValueError(f"grid and heads must have at most {MOST} places, got {grid} of {heads}")
    _number("checksum", header["checksum"], 0, 2**32 - 1)
    return block, grid, heads, _number("capacity", header["capacity"], 0)


def _pair(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{name} must be two ints, got {shown(value)}")
    return _number(name, value[0], 0), _number(name, value[1], 0)


def _number(name: str, value: object, least: int, most: int = MOST) -> int:
    """Raises ValueError for what is no int from ``least`` to ``most``."""
    if not is_int(value) or not least <= value <= most:
        raise ValueError(f"{name} must be an int from {least} to {most}, got {shown(value)}")
    return int(value)


def _check_tensors(tensors: Mapping[str, torch.Tensor], blocks: Blocks) -> None:
    """Raises ValueError for tensors of other names, shapes, dtypes and devices, and for such as
    have no memory of their own, TypeError for what is no dense tensor."""
    if not isinstance(tensors, Mapping):
        raise TypeError(
            "tensors must be a dict, the second of what Layout.state() gives, got "
            f"{type(tensors).__name__}"
        )
    if set(tensors) != set(NAMES):
        raise ValueError(
            f"a layout has the tensors {', '.join(NAMES)}, got "
            f"{', '.join(map(str, tensors)) or 'none'}: pass what state() gives"
        )
    check_dense(NAMES, **tensors)
    device = tensors[NAMES[0]].device
    for name, shape in zip(NAMES, tensor_shapes(blocks), strict=True):
        tensor = tensors[name]
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must have dtype torch.int32, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device} and {NAMES[0]} on {device}: move it there"
            )
        _check_memory(name, tensor)


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor whose values do not all lie in memory."""
    if not has_values(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError(
            f"{name} has no values here to look at (a meta or fake tensor, or one inside a "
            "transform of torch.func): load outside"
        )
    if overlaps_itself(tensor):  # which a copy would make of any size
        raise ValueError(f"{name} must have memory for each of its elements; clone it")
    reach = tensor.storage_offset() * tensor.element_size() + span(tensor)
    if not tensor._is_zerotensor() and tensor.untyped_storage().nbytes() < reach:
        raise ValueError(f"{name} has no memory: its storage has been freed or cut")


def _made(tensors: Mapping[str, torch.Tensor], blocks: Blocks) -> tuple[torch.Tensor, ...]:
    """The tensors of the stored bits. Raises ValueError where the state's differ."""
    state = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    counts = state["counts"].tolist()
    mask = bits.unpack(state["row_bits"], blocks.grid_cols)
    live = int(mask.count_nonzero())
    if live > blocks.capacity or counts[0] != live or min(counts) < 0:
        raise ValueError(
            f"counts must begin with the {live} blocks of row_bits, of at most {blocks.capacity}, "
            f"got {counts}"
        )
    shaped = mask.view(blocks.heads, blocks.grid_rows, blocks.grid_cols)
    rebuilt = writing.of_mask(shaped, blocks, mask.device)
    for name, right in zip(NAMES[:-1], rebuilt, strict=False):
        if not torch.equal(state[name], right):
            raise ValueError(f"{name} is not that of a layout with these row_bits: make it again")
    rebuilt[-1].copy_(state["counts"])  # with what was dropped
    return rebuilt
