"""Plans with tensor maps, several launches one behind the other, and new tensors, without a GPU."""

import ctypes
import gc
import struct
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch

from kernlib import events
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.parameters import MAP_ALIGNMENT, MAP_BYTES
from kernlib.lowering.steps import Step
from kernlib.runtime import devices, sequence, tensor_map
from kernlib.runtime.plan import Plan, start_all

MAP = tensor_map.TensorMap("float16", (8, 8), (16,), (8, 8), 0)


class Driver:
    """Stands for cuLaunchKernelEx and cuTensorMapEncodeTiled: notes launches as bytes of their
    blocks, their configs as the driver reads them, and the addresses of which a map was encoded,
    which are all that their maps hold."""

    def __init__(self):
        self.launched, self.encoded, self.size, self.refused = [], [], 0, set()
        self.block, self.configs = 0, []

    def launch(self, config, function, arguments, extra):
        self.block = ctypes.c_void_p.from_address(arguments).value
        self.configs.append(read(config))
        stream = self.configs[-1].stream
        self.launched.append((int(function), stream, ctypes.string_at(self.block, self.size)))
        return (0,)

    def encode(self, place, kind, rank, address, *others):
        self.encoded.append(address.value)
        ctypes.memset(place.value, 0, MAP_BYTES)
        if address.value in self.refused:
            return 1
        ctypes.c_uint64.from_address(place.value).value = address.value
        return 0


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is 64 bytes, 8 behind its beginning."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("shape", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


def read(config):
    """What the driver reads of a config, itself included."""
    raw = Config.from_address(config.getPtr())
    attributes = [(each.id, each.value[0]) for each in raw.attributes[: raw.count]]
    return SimpleNamespace(
        shape=tuple(raw.shape), stream=raw.stream or 0, attributes=attributes, config=config
    )


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr("kernlib.runtime.driver.launch_kernel_ex", lambda: made.launch)
    monkeypatch.setattr("kernlib.runtime.driver.version", lambda: 13000)
    monkeypatch.setattr("kernlib.runtime.driver.encode_tiled", lambda: made.encode)
    monkeypatch.setattr(devices, "current_device", lambda: 0)
    monkeypatch.setattr(devices, "current_stream", lambda device: 700 + device)
    return made


def plan(driver, *arguments, function=1, device=0, **options):
    spec = KernelSpec("family", "source", "entry", 32, 49152, description=f"kernel {function}")
    kernel = SimpleNamespace(spec=spec, key="0" * 64, arch="sm_90a", function=function)
    return Plan(kernel, device, (5, 6), *arguments, **options)


def block(*pointers, maps=2, tail=b"tail"):
    """What a kernel is to read."""
    heads = [struct.pack("<Q", p).ljust(MAP_BYTES, b"\0") for p in pointers[:maps]]
    return b"".join(heads) + struct.pack(f"<{len(pointers) - maps}Q", *pointers[maps:]) + tail


@pytest.fixture
def mapped(driver):
    driver.size = 2 * MAP_BYTES + 8 + 4
    return plan(driver, 1, "", b"tail", (MAP, MAP))


def test_maps_hold_the_addresses_whichever_operand_moves(driver, mapped):
    calls = [(16, 32, 1 << 63), (48, 32, 7), (48, 64, 7), (16, 32, 7), (80, 96, 0)]
    places = [16, 32, 48]
    calls += [(places[n % 3], places[n // 5 % 3] + 64 * (n // 15), n) for n in range(60)]
    for pointers in calls:
        mapped.launch(pointers)
    assert [found for _, _, found in driver.launched] == [block(*each) for each in calls]


def test_maps_lie_where_the_driver_takes_them_wherever_blocks_are(driver):
    plans = [plan(driver, n % 5, "", bytes(n), (MAP,)) for n in range(40)]
    blocks = set()
    for n, made in enumerate(plans):
        made.launch((16 * (n + 1), *range(n % 5)))
        blocks.add(driver.block)
    assert len(blocks) == 40 and all(block % MAP_ALIGNMENT == 0 for block in blocks)


def test_a_map_is_encoded_where_an_operand_is_for_the_first_time(driver, mapped):
    for pointers in [(16, 32, 1), (16, 32, 2), (16, 48, 3), (16, 32, 4), (16, 48, 5)]:
        mapped.launch(pointers)
    mapped.repeat()
    assert driver.encoded == [16, 32, 48] and driver.launched[-1] == driver.launched[-2]


def test_maps_of_many_addresses_are_right_and_bounded(driver, mapped):
    most = tensor_map.KNOWN_MAPS  # of one more, none is known when it comes round again
    for places, encoded in ((40, 100), (most, 0), (most + 1, 100)):
        calls = [(16 * (n % places + 1), 32, n) for n in range(100)]
        for pointers in calls[: 2 * places]:
            mapped.launch(pointers)
        driver.launched.clear(), driver.encoded.clear()
        for pointers in calls:
            mapped.launch(pointers)
        assert [found for _, _, found in driver.launched] == [block(*each) for each in calls]
        assert len(driver.encoded) == encoded


def test_after_a_map_that_was_refused_the_others_are_put_in_place_anew(driver, mapped):
    mapped.launch((16, 32, 1))
    driver.refused.add(64)
    with pytest.raises(RuntimeError, match="the driver refused"):
        mapped.launch((48, 64, 2))
    assert len(driver.launched) == 1
    with pytest.raises(RuntimeError, match="the driver refused"):
        mapped.launch((48, 64, 2))
    mapped.launch((16, 32, 3))
    assert driver.launched[-1][2] == block(16, 32, 3)
    driver.refused.clear()
    mapped.launch((48, 64, 4))
    assert driver.launched[-1][2] == block(48, 64, 4)


def test_a_launch_that_fails_is_named(driver):
    failed = SimpleNamespace(name="CUDA_ERROR_LAUNCH_FAILED")
    driver.launch = lambda *_: (failed,)
    made = plan(driver, 1, "", b"")
    for call in (lambda: made.launch((1,)), made.repeat):
        with pytest.raises(RuntimeError, match="launch of kernel 1 failed: CUDA_ERROR_LAUNCH"):
            call()


def test_a_repeated_launch_has_the_same_block(driver):
    driver.size = 8 + 16
    made = plan(driver, 1, "dQ", b"")
    made.launch((3,), [0.5, 4])
    made.repeat()
    assert driver.launched[0] == driver.launched[1] == (1, 700, struct.pack("<QdQ", 3, 0.5, 4))


def test_each_launch_is_on_the_stream_that_is_current(driver, monkeypatch):
    driver.size = 8
    made, streams = plan(driver, 1, "", b""), (700, 7, 7, 0, 1 << 47, 7)
    for number, stream in enumerate(streams):
        monkeypatch.setattr(devices, "current_stream", lambda device, stream=stream: stream)
        made.launch((number,))
        start_all(((made, itemgetter(slice(0, 1)), 0),), 0, [number])
        made.repeat()
    wanted = [(1, s, struct.pack("<Q", n)) for n, s in enumerate(streams) for _ in range(3)]
    assert driver.launched == wanted


def test_plans_one_behind_the_other_pick_their_addresses(driver):
    driver.size = 16 + 16
    first = plan(driver, 2, "", bytes(16), function=1)
    second = plan(driver, 2, "dQ", b"", function=2)
    heard = []
    stop = events.subscribe(heard.append)
    try:
        steps = ((first, itemgetter(0, 3), 0), (second, itemgetter(3, 2), 1))
        start_all(steps, 0, [11, 22, 33, 44], [0.5, 9])
    finally:
        stop()
    assert driver.launched == [
        (1, 700, struct.pack("<QQQQ", 11, 44, 0, 0)),
        (2, 700, struct.pack("<QQdQ", 44, 33, 0.5, 9)),
    ]
    assert [event.description for event in heard] == ["kernel 1", "kernel 2"]


# What the driver is told beside the block.

SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def test_a_config_is_what_the_driver_reads(driver):
    plan(driver, 1, "", b"").launch((3,))
    (found,) = driver.configs
    assert (found.shape, found.stream) == ((5, 6, 1, 32, 1, 1, 49152), 700)
    assert driver.encoded == []  # a plan without maps


def test_plans_that_overlap_say_so_and_no_others(driver):
    for overlaps in (True, False):
        plan(driver, 1, "", b"", overlaps=overlaps).launch((3,))
    plan(driver, 1, "", b"").launch((3,))
    assert [found.attributes for found in driver.configs] == [[(SERIALIZATION, 1)], [], []]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_of_a_call_that_overlaps_is_such_a_plan(driver, overlaps, monkeypatch):
    kernel = plan(driver, 1, "", b"").kernel
    monkeypatch.setattr(sequence, "load", lambda spec, device: kernel)
    step = Step(kernel.spec, (5, 6), b"", (("right", 0),), overlaps=overlaps)
    (((made, pick, _),), _) = sequence.load_steps((step,), ("left", "right"), 0)
    made.launch(pick([3, 4]))
    assert [len(found.attributes) for found in driver.configs] == [overlaps]


@pytest.mark.parametrize(
    ("version", "count"), [(11080, 0), (12020, 0), (12030, 1), (12090, 1), (13000, 1)]
)
def test_drivers_that_capture_no_overlap_are_not_asked_for_one(driver, version, count, monkeypatch):
    monkeypatch.setattr("kernlib.runtime.driver.version", lambda: version)
    plan(driver, 1, "", b"", overlaps=True).launch((3,))
    assert len(driver.configs[0].attributes) == count


def test_a_plan_that_does_not_overlap_asks_no_drivers_version(driver, monkeypatch):
    monkeypatch.setattr("kernlib.runtime.driver.version", lambda: pytest.fail("asked"))
    plan(driver, 1, "", b"").launch((3,))
    assert len(driver.configs) == 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_each_stream_has_its_own_config(driver, overlaps, monkeypatch):
    streams = (7, 7, 1 << 47, 0, 0)
    monkeypatch.setattr(devices, "current_stream", lambda device: 7)
    made = plan(driver, 1, "", b"", overlaps=overlaps)
    for stream in streams:
        monkeypatch.setattr(devices, "current_stream", lambda device, stream=stream: stream)
        made.launch((3,))
    assert [found.stream for found in driver.configs] == list(streams)
    assert all(len(found.attributes) == overlaps for found in driver.configs)
    first, again, second, third, last = (found.config for found in driver.configs)
    assert first is again and third is last and len({id(first), id(second), id(third)}) == 3


def test_what_a_launch_points_to_lives_as_long_as_its_plan(driver):
    driver.size = 8 + 4
    plans = [plan(driver, 1, "", b"tail", overlaps=True, function=n + 1) for n in range(50)]
    gc.collect()
    others = [bytearray(b"\xff" * size) for size in range(16, 4096)]
    for number, made in enumerate(plans):
        made.launch((number,))
    assert len(others) == 4080
    assert driver.launched == [(n + 1, 700, struct.pack("<Q", n) + b"tail") for n in range(50)]
    assert all(found.attributes == [(SERIALIZATION, 1)] for found in driver.configs)
    assert {found.shape for found in driver.configs} == {(5, 6, 1, 32, 1, 1, 49152)}


# New tensors, by torch's raw call for host memory in place of that for a GPU's.


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize(
    "shape", [(), (0,), (5,), (2, 3, 4), (2, 0, 4), (1, 1), torch.Size([3, 2])]
)
def test_new_tensors_are_those_of_empty(shape, dtype, raw, monkeypatch):
    device = torch.device("cpu")
    if raw:
        strided = torch._C._dynamo.guards._empty_strided_cpu
        monkeypatch.setattr(devices, "raw_empty", strided)
        device = torch.device("cuda:0")
    make = devices.allocator(shape, dtype, device)
    wanted = torch.empty(shape, dtype=dtype)
    first, second = make(), make()
    for found in (first, second):
        assert type(found) is torch.Tensor and found.dtype == dtype
        assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
        assert not found.requires_grad and not found.is_inference() and found._version == 0
    assert not shape or first.numel() == 0 or first.data_ptr() != second.data_ptr()
    with torch.inference_mode():
        assert make().is_inference()
