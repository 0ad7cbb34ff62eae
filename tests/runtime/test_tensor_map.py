"""Tensor maps: what the driver is asked to encode, where, and how seldom. One that notes what it is
told stands for the real one."""

import ctypes
from types import SimpleNamespace

import pytest

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.parameters import MAP_ALIGNMENT, MAP_BYTES
from kernlib.lowering.tma import TensorMap
from kernlib.runtime.plan import Plan
from kernlib.runtime.tensor_map import Encoder
from tests.support import fakes

X = TensorMap("float16", (48, 1, 25088, 2), (16, 192, 96), (64, 1, 128, 1), 128)
Y = TensorMap("float32", (100, 3, 7, 5), (400, 1200, 8400), (32, 1, 64, 1), 64)


class Driver:
    """cuTensorMapEncodeTiled, which writes the address and a count of calls where the map goes."""

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
        if self.status == 0:
            words = (ctypes.c_uint64 * 16).from_address(place.value)
            words[0], words[15] = address.value or 0, len(self.calls)
        return self.status

    @property
    def addresses(self):
        return [call.address for call in self.calls]


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr("kernlib.runtime.driver.encode_tiled", lambda: made)
    return made


# One map.


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


# Maps of plans.


@pytest.fixture
def plan(monkeypatch, driver):
    """A plan of two maps, two pointers of its own and one number, and what its launches read."""
    fakes.forget()
    fakes.install(monkeypatch)
    seen = []

    def launched(config, function, arguments, extra):
        block = driver.calls[0].place
        assert ctypes.c_void_p.from_address(arguments).value == block
        seen.append((block, ctypes.string_at(block, 2 * MAP_BYTES + 32)))
        return (0,)

    monkeypatch.setattr("kernlib.runtime.driver.launch_kernel_ex", lambda: launched)
    spec = KernelSpec("test", "source", "entry", 384, description="a kernel with maps")
    kernel = SimpleNamespace(spec=spec, key="0" * 64, arch="sm_90a", function=1)
    made = Plan(kernel, 0, (7, 1), 2, "d", b"12345678", (X, Y))
    yield SimpleNamespace(launch=made.launch, repeat=made.repeat, seen=seen)
    fakes.forget()


def words(block: bytes) -> list[int]:
    """Addresses: those of the maps, as the driver wrote them, and the block's own."""
    own = block[2 * MAP_BYTES : 2 * MAP_BYTES + 16]
    return [int.from_bytes(part[:8], "little") for part in (block, block[MAP_BYTES:], own, own[8:])]


def test_maps_come_first_and_are_aligned(plan, driver):
    plan.launch((0x1000, 0x2000, 3, 4), [0.5])
    ((block, held),) = plan.seen
    assert block % MAP_ALIGNMENT == 0
    assert [call.place for call in driver.calls] == [block, block + MAP_BYTES]
    assert [call.sizes for call in driver.calls] == [list(X.sizes), list(Y.sizes)]
    assert words(held) == [0x1000, 0x2000, 3, 4]
    assert held[2 * MAP_BYTES + 24 :] == b"12345678"


def test_blocks_are_aligned_wherever_they_lie(monkeypatch, driver):
    fakes.install(monkeypatch)
    monkeypatch.setattr("kernlib.runtime.driver.launch_kernel_ex", lambda: lambda *_: (0,))
    kernel = SimpleNamespace(
        spec=KernelSpec("test", "", "entry", 32), key="", arch="sm_90a", function=1
    )
    plans = [Plan(kernel, 0, (1, 1), index % 5, "", bytes(index), (X,)) for index in range(40)]
    for index, made in enumerate(plans):
        made.launch((0x100 * (index + 1), *range(index % 5)))
    assert len({call.place for call in driver.calls}) == 40
    assert all(call.place % MAP_ALIGNMENT == 0 for call in driver.calls)


def test_a_map_is_encoded_when_its_operand_has_moved_and_not_before(plan, driver):
    plan.launch((0x1000, 0x2000, 3, 4), [0.5])
    plan.launch((0x1000, 0x2000, 5, 6), [0.5])
    plan.repeat()
    assert driver.addresses == [0x1000, 0x2000]
    assert words(plan.seen[1][1]) == [0x1000, 0x2000, 5, 6] == words(plan.seen[2][1])
    plan.launch((0x1000, 0x3000, 3, 4), [0.5])
    assert words(plan.seen[3][1]) == [0x1000, 0x3000, 3, 4]
    assert driver.addresses[2:] in ([0x3000], [0x1000, 0x3000])
    plan.launch((0x3000, 0x1000, 3, 4), [0.5])
    assert words(plan.seen[4][1]) == [0x3000, 0x1000, 3, 4]


def test_maps_are_right_whatever_moves(plan, driver):
    places = [0x1000, 0x2000, 0x3000]
    for turn in range(60):
        wanted = (places[turn % 3], places[turn // 5 % 3] + 64 * (turn // 15), turn, turn + 1)
        plan.launch(wanted, [0.5])
        assert words(plan.seen[-1][1]) == list(wanted)
    for turn in range(200):
        plan.launch((0x10000 + 64 * turn, 0x1000, 3, 4), [0.5])
        assert words(plan.seen[-1][1])[:2] == [0x10000 + 64 * turn, 0x1000]


def test_a_refused_map_is_not_taken_for_encoded(plan, driver):
    plan.launch((0x1000, 0x2000, 3, 4), [0.5])
    driver.status = 1
    with pytest.raises(RuntimeError, match="the driver refused"):
        plan.launch((0x1000, 0x2008, 3, 4), [0.5])
    with pytest.raises(RuntimeError, match="at 0x2008: error 1"):
        plan.launch((0x1000, 0x2008, 3, 4), [0.5])
    assert len(plan.seen) == 1
    driver.status = 0
    plan.launch((0x1000, 0x2000, 3, 4), [0.5])
    assert words(plan.seen[-1][1]) == [0x1000, 0x2000, 3, 4]
    plan.launch((0x1000, 0x2008, 3, 4), [0.5])
    assert words(plan.seen[-1][1]) == [0x1000, 0x2008, 3, 4]


def test_plans_without_maps_ask_no_driver(monkeypatch, driver):
    fakes.install(monkeypatch)
    monkeypatch.setattr("kernlib.runtime.driver.launch_kernel_ex", lambda: lambda *_: (0,))
    kernel = SimpleNamespace(
        spec=KernelSpec("test", "", "entry", 32), key="", arch="sm_90a", function=1
    )
    Plan(kernel, 0, (1, 1), 1, "", b"").launch((0x1000,))
    assert not driver.calls
