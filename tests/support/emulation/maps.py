"""Launches of kernels with tensor maps: as ``common/hopper.cuh`` beside this file reads these, in
place of the driver's."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from kernlib.lowering.parameters import MAP_ALIGNMENT, MAP_BYTES
from kernlib.lowering.steps import NUMBER, Step
from kernlib.lowering.tma import TensorMap
from tests.support.emulation.emulator import Emulator

LAYOUT = "<Q4I3Q4H2I"  # struct TensorMap
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4}


def encoded(tensor_map: TensorMap, address: int) -> bytes:
    """A map of a tensor of four dimensions, which must be one that the driver takes."""
    itemsize, strides = ITEMSIZES[tensor_map.dtype], tensor_map.strides
    assert len(tensor_map.sizes) == 4 and address % 16 == 0
    assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in strides)
    assert all(0 < size <= 2**32 for size in tensor_map.sizes)
    assert all(0 < size <= 256 for size in tensor_map.box)
    assert tensor_map.box[0] * itemsize <= tensor_map.swizzle
    numbers = (*tensor_map.sizes, *strides, *tensor_map.box, itemsize, tensor_map.swizzle)
    return struct.pack(LAYOUT, address, *numbers).ljust(MAP_BYTES, b"\0")


def launch(
    emulator: Emulator, step: Step, addresses: Sequence[int], scalars: Sequence[float] = ()
) -> None:
    """One launch with the addresses of its pointers, in order."""
    count = len(step.maps)
    maps = [encoded(*each) for each in zip(step.maps, addresses[:count], strict=True)]
    own = addresses[count:]
    numbers = [part for value in scalars[: step.scalars] for part in (value, 0)]
    block = b"".join(maps) + struct.pack(f"@{len(own)}P", *own)
    block += struct.pack("<" + NUMBER * step.scalars, *numbers) + step.fixed
    memory = ctypes.create_string_buffer(len(block) + MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % MAP_ALIGNMENT
    memory[start : start + len(block)] = block
    emulator.launch(step.spec, step.grid, ctypes.addressof(memory) + start)


# Of cuda.h.
DTYPES = {6: "float16", 7: "float32", 9: "bfloat16"}
SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}


def encode(place, kind, rank, address, sizes, strides, box, ones, interleave, swizzle, *_) -> int:
    """In the place of cuTensorMapEncodeTiled, of the same arguments."""
    dtype, inner = DTYPES[kind.value], [*strides][: rank.value - 1]
    tensor_map = TensorMap(dtype, (*sizes,), (*inner,), (*box,), SWIZZLES[swizzle.value])
    ctypes.memmove(place.value, encoded(tensor_map, address.value), MAP_BYTES)
    return 0
