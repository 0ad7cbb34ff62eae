"""Tensor maps: what Hopper's copy engine must know of a tensor, encoded by the driver.

A map holds the tensor's address, so a plan encodes its maps anew when an operand has moved: 1 us by
ctypes with arguments made once, where cuda.bindings takes 10.
"""

from __future__ import annotations

import ctypes

from kernlib.lowering.parameters import MAP_BYTES
from kernlib.lowering.tma import TensorMap
from kernlib.runtime import driver

KNOWN_MAPS = 16  # addresses for which a plan keeps a map encoded

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion in cuda.h.
_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTE_256_BYTES = 3


class Encoder:
    """Encodes one map into a place in memory, which the owner of this object keeps alive."""

    __slots__ = ("_arguments", "_map")

    def __init__(self, tensor_map: TensorMap, place: int):
        rank = len(tensor_map.sizes)
        sizes = (ctypes.c_uint64 * rank)(*tensor_map.sizes)
        strides = (ctypes.c_uint64 * rank)(*tensor_map.strides)
        box = (ctypes.c_uint32 * rank)(*tensor_map.box)
        ones = (ctypes.c_uint32 * rank)(*[1] * rank)
        kind, swizzle = _TYPES[tensor_map.dtype], _SWIZZLES[tensor_map.swizzle]
        head = (ctypes.c_void_p(place), ctypes.c_int(kind), ctypes.c_uint32(rank))
        tail = (sizes, strides, box, ones)
        # No interleaving; boxes are filled up with zeros.
        flags = (0, swizzle, _PROMOTE_256_BYTES, 0)
        self._arguments = (head, (*tail, *map(ctypes.c_int, flags)))
        self._map = tensor_map

    def __call__(self, address: int) -> None:
        """Encode the map of a tensor at ``address``. Raises RuntimeError if the driver refuses."""
        head, tail = self._arguments
        status = driver.encode_tiled()(*head, ctypes.c_void_p(address), *tail)
        if status != 0:
            raise RuntimeError(f"the driver refused {self._map} at {address:#x}: error {status}")


class Maps:
    """The encoded tensor maps at the head of a block. Results are often written to two places in
    turn, one while the other is still in use, so maps are kept by address: a copy of one takes
    0.1 us, encoding it 1 us and more."""

    __slots__ = ("_block", "_encoders", "_held", "_known", "_places")

    def __init__(self, maps: tuple[TensorMap, ...], memory: ctypes.Array, start: int):
        self._block = memoryview(memory).cast("B")
        starts = [start + MAP_BYTES * index for index in range(len(maps))]
        first = ctypes.addressof(memory)
        self._encoders = [Encoder(m, first + at) for m, at in zip(maps, starts, strict=True)]
        self._places = [slice(at, at + MAP_BYTES) for at in starts]
        self._held: tuple = ()  # the addresses of the maps in the block
        self._known: list[dict[int, bytes]] = [{} for _ in maps]

    def encode(self, pointers: tuple[int, ...]) -> tuple[int, ...]:
        """Put the maps of the first pointers in place, and return the other pointers."""
        count = len(self._encoders)
        addresses = pointers[:count]
        if addresses != self._held:
            before, self._held = self._held, ()  # nothing is held if one is refused
            for index, address in enumerate(addresses):
                if not before or address != before[index]:
                    self._put(index, address)
            self._held = addresses
        return pointers[count:]

    def _put(self, index: int, address: int) -> None:
        maps, place = self._known[index], self._places[index]
        encoded = maps.get(address)
        if encoded is not None:
            self._block[place] = encoded
            return
        self._encoders[index](address)
        if len(maps) >= KNOWN_MAPS:
            maps.clear()
        maps[address] = bytes(self._block[place])
