"""The bitmap format on the GPU: the bytes of the CPU's encoder, entries back bit by bit, sizes past
2^31, no more synchronisations than promised."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernlib.families.sparse.formats import bitmap
from kernlib.families.sparse.formats import dense as dense_format
from kernlib.families.sparse.formats import registry as formats
from kernlib.families.sparse.formats.encoding import BITS
from kernlib.families.sparse.lowering import choose
from kernlib.jit import service
from kernlib.runtime import devices
from tests.gpu.watched import capture

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = [
    (0, 0), (0, 5), (5, 0), (1, 1), (1, 300), (17, 1), (33, 257), (48, 512), (100, 2056),
    (1000, 1001), (20, 20_000), (5000, 20),
]  # fmt: skip
DENSITIES = (0, 0.01, 0.3, 0.5, 0.9, 1)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def built():
    """The kernels, compiled side by side."""
    arch = devices.arch_of(torch.cuda.current_device())
    specs = choose.codec_specs("bitmap", ("float16", "float32"))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda spec: service.build(spec, arch), specs))


def random(shape, density, dtype):
    dense = torch.randn(shape, device="cuda").to(dtype)
    return dense.masked_fill_(torch.rand(shape, device="cuda") >= density, 0)


def same(found, dense):
    """Whether a decoded matrix has the bits of another, and 0.0 where that has -0.0."""
    bits = dense.view(BITS[dense.dtype])
    plain = bits.masked_fill(bits == torch.iinfo(bits.dtype).min, 0)
    return found.shape == dense.shape and torch.equal(found.view(bits.dtype), plain)


def check(dense):
    """The GPU's bytes against the CPU's, and back."""
    tensors, facts = bitmap.encode(dense)
    wanted, known = bitmap.encode(dense.cpu())
    assert facts == known
    for name in bitmap.TENSORS:
        assert tensors[name].is_cuda and torch.equal(tensors[name].cpu(), wanted[name]), name
    assert bitmap.nbytes(dense) == bitmap.nbytes(dense.cpu())
    bitmap.check(tensors, facts, tuple(dense.shape), dense.dtype)
    found = bitmap.decode(tensors, facts, tuple(dense.shape), dense.dtype)
    assert found.is_contiguous() and same(found, dense)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_cpu(shape, dtype, seed):
    for density in DENSITIES:
        check(random(shape, density, dtype))


@every_dtype
def test_strides(dtype, seed):
    whole = random((130, 1100), 0.4, dtype)
    for view in (
        whole.T, whole[:, 1:], whole[:, 8:], whole[1::2, 8:], whole[3:, ::2], whole[5:6],
        whole[:1].expand(20, 1100), whole[:, :1].expand(130, 70), whole[::3, ::7].T,
    ):  # fmt: skip
        check(view)


@every_dtype
def test_every_bit_comes_back(dtype, seed):
    size = dtype.itemsize
    values = torch.randint(0, 256, (64, 1024 * size), dtype=torch.uint8, device="cuda")
    dense = values.view(dtype)  # NaNs with payloads, infinities, subnormals
    dense[::2, ::3] = 0.0
    dense[1::2, ::3] = -0.0
    check(dense)


@every_dtype
def test_skewed_matrices(dtype, seed):
    dense = torch.zeros(100, 2000, device="cuda", dtype=dtype)
    dense[50] = 1
    dense[:, 777] = 2
    dense[96:, 1792:] = 3
    check(dense)


@every_dtype
def test_the_choice_of_a_format_is_the_cpu_s(dtype, seed):
    for density in (0, 0.03, 0.2, 0.5, 1):
        dense = random((300, 1001), density, dtype)
        assert formats.measured(dense) == formats.measured(dense.cpu())
        assert formats.auto(dense) in formats.FORMATS


def test_more_than_2_to_the_31_elements(seed):
    rows, cols = 70_000, 32_768
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("takes 16 GiB")
    dense = torch.empty(rows, cols, device="cuda", dtype=torch.float16)
    for part in dense.split(5000):
        part.normal_().masked_fill_(torch.rand_like(part) >= 0.3, 0)
    tensors, facts = bitmap.encode(dense)
    last, _ = bitmap.encode(dense[-48:])
    count = last["offsets"].numel() - 1
    assert torch.equal(tensors["data"][-last["data"].numel() :], last["data"])
    assert torch.equal(tensors["offsets"][-count - 1 :].diff(), last["offsets"].diff())
    found = bitmap.decode(tensors, facts, (rows, cols), dense.dtype)
    for x, y in zip(found.split(5000), dense.split(5000), strict=True):
        assert same(x, y)


def test_synchronisations(seed):
    dense = random((200, 3000), 0.5, torch.float16)
    tensors, facts = bitmap.encode(dense)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            again, _ = bitmap.encode(dense)
            assert len(seen) <= 1, [str(warning.message) for warning in seen]
        torch.cuda.set_sync_debug_mode("error")
        bitmap.decode(again, facts, (200, 3000), dense.dtype)
        bitmap.chunk_counts(dense)
        dense_format.decode(dense_format.encode(dense)[0], {}, (200, 3000), dense.dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tensors["data"], again["data"])


def test_decoding_in_a_graph(seed):
    dense = random((200, 3000), 0.5, torch.bfloat16)
    tensors, facts = bitmap.encode(dense)
    how = tensors, facts, (200, 3000), dense.dtype
    bitmap.decode(*how)
    with capture() as graph:
        found = bitmap.decode(*how)
    found.zero_()
    graph.replay()
    assert same(found, dense)


def test_another_stream_and_repeated_bits(seed):
    dense = random((500, 3001), 0.5, torch.float32)
    first, _ = bitmap.encode(dense)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again, facts = bitmap.encode(dense)
        found = bitmap.decode(again, facts, (500, 3001), dense.dtype)
    stream.synchronize()
    assert torch.equal(first["data"], again["data"]) and same(found, dense)
