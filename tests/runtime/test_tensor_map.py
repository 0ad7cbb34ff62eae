"""A tensor map: what the driver is asked to encode. One that notes what it is told stands for the
real one."""

import ctypes
from types import SimpleNamespace

import pytest

from kernlib.lowering.tma import TensorMap
from kernlib.runtime.tensor_map import Encoder

X = TensorMap("float16", (48, 1, 25088, 2), (16, 192, 96), (64, 1, 128, 1), 128)


class Driver:
    """cuTensorMapEncodeTiled."""

    def __init__(self):
        self.calls, self.status = [], 0

    def __call__(self, place, kind, rank, address, sizes, strides, box, ones, *flags):
        types = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        assert all(
            isinstance(x, t) for x, t in zip((place, kind, rank, address), types, strict=True)
        )
        assert all(isinstance(flag, ctypes.c_int) for flag in flags)
        assert sizes._type_ is strides._type_ is ctypes.c_uint64
        assert box._type_ is ones._type_ is ctypes.c_uint32
        self.calls.append(
            SimpleNamespace(
                place=place.value, kind=kind.value, rank=rank.value, address=address.value,
                sizes=list(sizes), strides=list(strides), box=list(box), ones=list(ones),
                flags=[flag.value for flag in flags],
            )
        )  # fmt: skip
        return self.status


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr("kernlib.runtime.driver.encode_tiled", lambda: made)
    return made


def test_the_driver_is_told_of_every_dimension(driver):
    memory = (ctypes.c_uint64 * 16)()
    Encoder(X, ctypes.addressof(memory))(0x7000)
    (call,) = driver.calls
    assert (call.place, call.address) == (ctypes.addressof(memory), 0x7000)
    assert (call.kind, call.rank) == (6, 4)  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    assert call.sizes == [48, 1, 25088, 2]
    assert call.strides[:3] == [16, 192, 96]
    assert (call.box, call.ones) == ([64, 1, 128, 1], [1, 1, 1, 1])
    # No interleaving, swizzled by 128 bytes, 256 bytes into L2, zeros outside.
    assert call.flags == [0, 3, 3, 0]


KINDS = {"float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
INTO_L2 = 3  # 256 bytes at a time


@pytest.mark.parametrize(("dtype", "kind"), KINDS.items())
@pytest.mark.parametrize(("swizzle", "code"), SWIZZLES.items())
def test_types_and_swizzles_are_those_of_the_driver(driver, dtype, kind, swizzle, code):
    memory = (ctypes.c_uint64 * 16)()
    Encoder(X._replace(dtype=dtype, swizzle=swizzle), ctypes.addressof(memory))(16)
    assert (driver.calls[0].kind, driver.calls[0].flags) == (kind, [0, code, INTO_L2, 0])


def test_the_numbers_are_those_of_the_header_of_cuda():
    driver = pytest.importorskip("cuda.bindings.driver")
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    for name, kind in KINDS.items():
        assert getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}") == kind
    for size, code in SWIZZLES.items():
        name = f"{size}B" if size else "NONE"
        assert getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{name}") == code
    promotion = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert promotion == INTO_L2


def test_a_refusal_says_what_was_asked(driver):
    driver.status = 1
    with pytest.raises(
        RuntimeError, match=r"refused TensorMap\(dtype='float16', sizes=\(48, 1"
    ) as e:
        Encoder(X, 0)(0x7008)
    assert "at 0x7008: error 1" in str(e.value)
