"""The bitmap format: its bytes against a scalar encoder, entries back bit by bit, checks of loaded
tensors, and the device code of its kernels for every target."""

import math
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernlib.errors import UnsupportedError
from kernlib.families.sparse.formats import bitmap
from kernlib.families.sparse.formats import bitmap_cpu as cpu
from kernlib.families.sparse.formats import bitmap_gpu as gpu
from kernlib.families.sparse.formats.encoding import readable
from kernlib.families.sparse.kernels.codecs.bitmap import Count, Decode, Encode
from kernlib.families.sparse.lowering import choose
from kernlib.jit import sources, targets
from kernlib.jit.compiler import compile_spec
from tests.support.speeds import slow_but

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = {2: torch.int16, 4: torch.int32}
NAMES = {2: "float16", 4: "float32"}
# Zeros with a sign, infinities, NaNs with payloads, subnormals: (16, 32 bits).
SPECIAL = {
    2: (0x8000, 0x7C00, 0xFC00, 0x7E01, 0xFE55, 0x7C01, 0x0001, 0x83FF, 0x7F80, 0x7FC1),
    4: (0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0x7F800001, 1, 0x807FFFFF),
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def integers(dense):
    return dense.resolve_neg().view(INTEGERS[dense.element_size()])


def plain(found):
    """Integers of values, those of -0.0 as 0."""
    return found.masked_fill(found == torch.iinfo(found.dtype).min, 0)


def scalar_chunk(entries, code):
    """A chunk of entries (row, column, bits), from the layout's text alone."""
    words, values = [0] * 128, []
    for r, column, value in entries:
        block, c = divmod(column, 32)
        half, g, t, plane, j = r // 8, r % 8, c // 8, c % 8 // 4, c % 4
        q = g // 2
        words[(block * 4 + (q ^ block // 2)) * 4 + half * 2 + plane] |= 1 << 8 * j + g % 2 * 4 + t
        values.append(((block, half, plane, g, t, j), value))
    packed = (struct.pack(f"<{code}", value) for _, value in sorted(values))
    made = struct.pack("<128I", *words) + b"".join(packed)
    return made + bytes(-len(made) % 16)


def scalar_encoder(dense):
    """The bytes of data, the offsets and the largest chunk."""
    rows, cols = dense.shape
    code = "h" if dense.element_size() == 2 else "i"
    chunks = {}
    found = integers(dense.contiguous())
    for r, c in (plain(found) != 0).nonzero().tolist():
        entry = r % 16, c % 256, found[r, c].item()
        chunks.setdefault((r // 16, c // 256), []).append(entry)
    order = ((slab, k) for slab in range(-(-rows // 16)) for k in range(-(-cols // 256)))
    parts = [scalar_chunk(chunks.get(place, ()), code) for place in order]
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part) // 16)
    return b"".join(parts), ends, max(map(len, parts), default=0)


def same(found, dense):
    """Whether a decoded matrix has the bits of another, and 0.0 where that has -0.0."""
    if found.shape != dense.shape or found.dtype != dense.dtype:
        return False
    return torch.equal(integers(found), plain(integers(dense)))


def check(dense):
    tensors, facts = bitmap.encode(dense)
    data, offsets, largest = scalar_encoder(dense)
    assert tuple(tensors) == bitmap.TENSORS
    assert bytes(tensors["data"].tolist()) == data and tensors["data"].dtype == torch.uint8
    assert tensors["offsets"].tolist() == offsets and tensors["offsets"].dtype == torch.int32
    assert facts == {"largest": largest}
    assert bitmap.nbytes(dense) == len(data) + 4 * len(offsets)
    shape, dtype = tuple(dense.shape), dense.dtype
    bitmap.check(tensors, facts, shape, dtype)
    found = bitmap.decode(tensors, facts, shape, dtype)
    assert found.is_contiguous() and same(found, dense)


def random(shape, density, dtype):
    return torch.randn(shape).masked_fill(torch.rand(shape) >= density, 0).to(dtype)


@settings(max_examples=60)
@given(
    st.tuples(st.integers(0, 40), st.integers(0, 600)),
    st.floats(0, 1),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
def test_random_matrices(shape, density, dtype, seed):
    torch.manual_seed(seed)
    check(random(shape, density, dtype))


@every_dtype
def test_every_bit_comes_back(dtype, seed):
    size = dtype.itemsize
    patterns = torch.tensor(SPECIAL[size], dtype=torch.int64)
    values = torch.zeros(20, 300, dtype=INTEGERS[size])
    places = torch.randperm(values.numel())[: 50 * len(patterns)]
    values.view(-1)[places] = patterns.repeat(50).to(values.dtype)
    dense = values.view(dtype)
    check(dense)
    tensors, facts = bitmap.encode(dense)
    stored = int(cpu.chunk_counts(dense).sum())
    assert stored == len(places) - 50  # all but -0.0
    assert math.isnan(bitmap.decode(tensors, facts, (20, 300), dtype).float().sum())


@every_dtype
def test_what_pruning_leaves_is_no_entry(dtype, seed):
    kept = torch.rand(40, 600) < 0.3
    dense = torch.randn(40, 600).to(dtype) * kept  # -0.0 at half of the pruned places
    assert ((dense == 0) & dense.signbit()).sum() > 5000
    check(dense)
    tensors, facts = bitmap.encode(dense)
    clean, known = bitmap.encode(dense.masked_fill(~kept, 0))
    assert facts == known and all(torch.equal(tensors[name], clean[name]) for name in clean)
    found = bitmap.decode(tensors, facts, (40, 600), dtype)
    assert torch.equal(found, dense) and not found.signbit()[~kept].any()


@pytest.mark.parametrize("flushed", [False, True])
def test_subnormals_are_entries(flushed):
    dense = torch.full((17, 300), 1, dtype=torch.int32).view(torch.float32)
    if flushed and not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    try:
        check(dense)
        assert bitmap.encode(dense)[0]["data"].numel() == 4 * 512 + 17 * 300 * 4
    finally:
        torch.set_flush_denormal(False)


@every_dtype
def test_blocks_of_slabs(dtype, monkeypatch, seed):
    dense = random((100, 700), 0.3, dtype)
    dense[32:64] = 0
    for at_once in (1, 2 * 3 * cpu.POSITIONS):  # one slab a block, two slabs of three chunks
        monkeypatch.setattr(cpu, "AT_ONCE", at_once)
        check(dense)


def test_data_that_begins_anywhere_is_read(seed):
    dense = random((33, 257), 0.5, torch.float32)
    tensors, facts = bitmap.encode(dense)
    moved = torch.cat((torch.zeros(1, dtype=torch.uint8), tensors["data"]))[1:]
    assert same(bitmap.decode({**tensors, "data": moved}, facts, (33, 257), dense.dtype), dense)


def test_what_offsets_do_not_reach_is_refused(monkeypatch, seed):
    dense = random((64, 512), 0.5, torch.float16)
    tensors, _ = bitmap.encode(dense)
    monkeypatch.setattr(bitmap, "MOST_BYTES", tensors["data"].numel())
    assert bitmap.nbytes(dense) is None
    with pytest.raises(UnsupportedError, match=r"shape \(64, 512\).*32 GiB: compress slices"):
        bitmap.encode(dense)
    monkeypatch.setattr(bitmap, "MOST_BYTES", tensors["data"].numel() + 16)
    assert bitmap.nbytes(dense) is not None and bitmap.encode(dense)


def broken(change):
    """A matrix of two chunks, the second empty, after ``change(tensors, facts)``."""
    dense = torch.zeros(16, 512, dtype=torch.float16)
    dense[:, 3] = 1
    tensors, facts = bitmap.encode(dense)
    change(tensors, facts)
    return tensors, facts


WRONG = {
    "data must have dtype torch.uint8": lambda t, f: t.update(data=t["data"].view(torch.int8)),
    "offsets must be contiguous": lambda t, f: t.update(offsets=torch.zeros(6).int()[::2]),
    r"offsets must have shape \(3,\)": lambda t, f: t.update(offsets=t["offsets"][:2]),
    "data must have one dimension": lambda t, f: t.update(data=t["data"][None]),
    "offsets must begin with 0": lambda t, f: t["offsets"].add_(1),
    "and grow by 32 to 544 from": lambda t, f: t["offsets"][1].sub_(3),
    "grow by 32": lambda t, f: t["offsets"][2].sub_(1),
    "grow by 32 to": lambda t, f: t["offsets"][2].add_(513),
    "the fact largest must be 544, .* got 560": lambda t, f: f.update(largest=560),
    "the fact largest must be 544, .* got None": lambda t, f: f.clear(),
    "each bit: 1 of 2 chunks are": lambda t, f: t["data"][544:548].fill_(255),
    "for each bit: 2 of 2 chunks": lambda t, f: t["data"].zero_()[544].fill_(255),
}


@pytest.mark.parametrize("shape", [(16, 300), (17, 256), (5, 7), (40, 700)], ids=str)
def test_bits_beyond_the_edges_are_refused(shape, seed):
    rows, cols = (-(-size // step) * step for size, step in zip(shape, (16, 256), strict=True))
    for place in ((0, shape[1]), (shape[0], 0), (rows - 1, cols - 1)):
        if place[0] >= rows or place[1] >= cols:
            continue
        dense = random((rows, cols), 0.3, torch.float16)
        dense[shape[0] :], dense[:, shape[1] :] = 0, 0
        tensors, facts = bitmap.encode(dense)
        bitmap.check(tensors, facts, shape, torch.float16)
        dense[place] = 1
        tensors, facts = bitmap.encode(dense)
        with pytest.raises(ValueError, match="data must have no bits set beyond the matrix's"):
            bitmap.check(tensors, facts, shape, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_counted_some_chunks_at_a_time(dtype, seed, monkeypatch):
    monkeypatch.setattr(bitmap, "CHECKED", 4)
    dense = random((100, 700), 0.3, dtype)
    tensors, facts = bitmap.encode(dense)
    found = bitmap.marked(tensors["data"], tensors["offsets"][:-1])
    assert torch.equal(found, cpu.chunk_counts(dense)) and found.dtype == torch.int32
    bitmap.check(tensors, facts, (100, 700), dtype)


@pytest.mark.parametrize("message", WRONG)
def test_loaded_tensors_are_checked(message):
    tensors, facts = broken(WRONG[message])
    with pytest.raises(ValueError, match=message):
        bitmap.check(tensors, facts, (16, 512), torch.float16)


@pytest.mark.few(1)
@pytest.mark.parametrize("itemsize", INTEGERS)
@pytest.mark.parametrize("arch", slow_but(("sm_90a",), targets.SHARED_BYTES))
def test_kernels_compile_for_every_target(arch, itemsize):
    made = choose.codec_specs("bitmap", (NAMES[itemsize],))
    with ThreadPoolExecutor(2) as pool:
        entries = list(pool.map(lambda spec: compile_spec(spec, arch), made))
    for spec, entry in zip(made, entries, strict=True):
        assert entry.kernel == spec.entry and entry.cubin[:4] == b"\x7fELF"
        assert entry.meta["spill_bytes"] == "0" and not sources.system_includes(spec.source)
        registers, shared = int(entry.meta["registers"]), int(entry.meta["shared_bytes"])
        held = targets.resident_blocks(arch, spec.threads, registers, shared)
        assert held * spec.threads >= (512 if arch == "sm_90a" or itemsize == 2 else 256)


@pytest.mark.parametrize("itemsize", INTEGERS)
def test_grids_and_numbers_of_launches(itemsize):
    for codec in (Count(), Encode(), Decode()):
        sizes = (70000, 32769, 70000 * 32768)
        step = codec.step(*sizes, itemsize, True)
        chunks = 4375 * 129
        blocks = -(-chunks // 8) if codec.does == "count" else chunks
        assert step.grid == (blocks, 1)
        assert step.spec in choose.codec_specs("bitmap", (NAMES[itemsize],))
        values = struct.unpack(codec.fixed.format, step.fixed)
        assert values[:3] == sizes or (codec.does == "read" and values[:2] == sizes[:2])
        assert [name for name, _ in step.pointers] == list(codec.operands)


def test_what_lies_side_by_side_is_read_where_it_is():
    whole = torch.zeros(40, 64)
    for view in (whole, whole[:, 3:], whole[::2], whole[:1].expand(5, 64), whole[:, ::64]):
        assert readable(view) is view
    assert readable(whole.T).is_contiguous() and readable(whole[:, ::2]).is_contiguous()
    assert gpu.reading(whole[1:, 4:]) == (39, 60, 64, 4, True)
    assert gpu.reading(whole[:, 1:])[-1] is False
    assert gpu.reading(torch.zeros(4, 7).half())[-1] is False
    assert gpu.reading(torch.zeros(1, 7).half())[-1] is True
