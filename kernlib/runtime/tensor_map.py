"""Tensor maps: what Hopper's copy engine must know of a tensor, encoded by the driver.

A map holds the tensor's address, so a plan encodes its maps anew when an operand has moved: 1 us by
ctypes with arguments made once, where cuda.bindings takes 10.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

from kernlib.lowering.tma import TensorMap

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion in cuda.h.
_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTE_256_BYTES = 3


class Encoder:
    """Encodes one map to a place in memory that its owner keeps."""

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
        status = _encode_tiled()(*head, ctypes.c_void_p(address), *tail)
        if status != 0:
            raise RuntimeError(f"the driver refused {self._map} at {address:#x}: error {status}")


@lru_cache(maxsize=1)
def _encode_tiled() -> Callable:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
