"""The bitmap formats of values in fewer bits: their bytes against a scalar encoder, values within
half a step, groups that are rare, and checks of loaded tensors."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernlib import sparse
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.formats import bitmap, quantised, quantised_cpu, torch_layouts
from kernlib.families.sparse.formats.quantiser import LEAST_SCALE
from kernlib.families.sparse.lowering.quantised import QUANTISED
from tests.families.sparse.cases import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
every_format = pytest.mark.parametrize("name", QUANTISED)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(shape, density=0.5, dtype=torch.float16):
    return torch.randn(shape).masked_fill(torch.rand(shape) >= density, 0).to(dtype)


def encoded(name, dense):
    form = quantised.FORMATS[name]
    tensors, facts = form.encode(dense)
    form.check(tensors, facts, tuple(dense.shape), dense.dtype)
    return form, tensors, facts


def decoded(name, dense):
    form, tensors, facts = encoded(name, dense)
    return form.decode(tensors, facts, tuple(dense.shape), dense.dtype)


# The bytes, from the layout's text alone.


def bfloat16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).bfloat16().item()


def scalar_code(code, value: float, scale: float) -> int:
    share = torch.tensor(value, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32)
    share = share.clamp(-code.largest, code.largest)
    if code.values == "fp8":
        return share.to(torch.float8_e4m3fn).view(torch.uint8).item()
    q = round(share.item())  # half to even, as torch
    return q + 128 if code.values == "int8" else q & 15


def scalar_chunk(code, values: dict) -> bytes:
    """A chunk of values by (row, column)."""
    words, scales, streams = [0] * 128, [1.0] * (16 * code.groups), ([], [])
    most = {}
    for (r, column), value in values.items():
        key = r, column // code.columns
        most[key] = max(most.get(key, 0.0), abs(value))
    for (r, group), largest in most.items():
        number = (r % 8 * code.groups + group) * 2 + r // 8
        scales[number] = bfloat16(largest / code.largest)
    order = sorted(values, key=lambda at: (at[0] // 8, at[1] // 32, at[0] % 8, at[1] % 32))
    for r, column in order:
        b, c, half, g = column // 32, column % 32, r // 8, r % 8
        words[(b // 2 * 8 + (g ^ b // 2)) * 4 + b % 2 * 2 + half] |= 1 << c % 8 * 4 + c // 8
        scale = scales[(g * code.groups + column // code.columns) * 2 + half]
        streams[half].append(scalar_code(code, values[r, column], scale))
    if code.bits == 8:
        codes = bytes([*streams[0], *streams[1]])
    else:
        length = max(map(len, streams))
        upper, lower = ([*s, *[0] * (length - len(s))] for s in streams)
        codes = bytes(a | b << 4 for a, b in zip(upper, lower, strict=True))
    packed = struct.pack("<128I", *words)
    packed += torch.tensor(scales).bfloat16().view(torch.int16).numpy().tobytes() + codes
    return packed + bytes(-len(packed) % 16)


@every_format
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (37, 300), (16, 512)], ids=str)
def test_the_layout(shape, dtype, name, seed):
    dense, code = random(shape, 0.4, dtype), QUANTISED[name]
    form, tensors, facts = encoded(name, dense)
    chunks = {}
    for r, c in (dense != 0).nonzero().tolist():
        chunks.setdefault((r // 16, c // 256), {})[r % 16, c % 256] = dense[r, c].item()
    places = [(s, k) for s in range(-(-shape[0] // 16)) for k in range(-(-shape[1] // 256))]
    parts = [scalar_chunk(code, chunks.get(place, {})) for place in places]
    assert bytes(tensors["data"].tolist()) == b"".join(parts)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + len(part) // 16)
    assert tensors["offsets"].tolist() == ends and tensors["offsets"].dtype == torch.int32
    assert facts == {"largest": max(map(len, parts))}
    assert form.nbytes(dense) == sum(t.numel() * t.element_size() for t in tensors.values())


# Values.


@settings(max_examples=40)
@given(
    st.tuples(st.integers(0, 40), st.integers(0, 600)),
    st.floats(0, 1),
    st.sampled_from(DTYPES),
    st.sampled_from([*QUANTISED]),
    st.integers(0, 2**32 - 1),
)
def test_random_matrices(shape, density, dtype, name, seed):
    torch.manual_seed(seed)
    dense = random(shape, density, dtype)
    form, tensors, facts = encoded(name, dense)
    back = form.decode(tensors, facts, shape, dtype)
    assert back.shape == dense.shape and back.dtype == dtype and back.is_contiguous()
    assert not back[dense == 0].any() and form.stored(tensors) == int(dense.count_nonzero())
    by_entries = torch_layouts.of_tensor(dense.to_sparse_csr())
    others, other_facts = form.encode_entries(by_entries)
    assert other_facts == facts and all(torch.equal(tensors[n], others[n]) for n in tensors)
    assert form.measure_entries(by_entries) == form.nbytes(dense)
    read = torch.zeros_like(dense)
    for part in form.read_entries(tensors, facts, shape, dtype):
        read[part.rows, part.columns] = part.bits.view(dtype)
    assert same_bits(read + 0.0, back + 0.0)
    if dense.numel():
        check_errors(name, dense.float(), back.float())


def check_errors(name, dense, back):
    """Half a step of integers, half a unit in the last place of e4m3, and what rounding the scale
    costs the largest value and rounding to the dtype any."""
    code, cols = QUANTISED[name], dense.shape[1]
    wide = torch.nn.functional.pad(dense, (0, -cols % code.columns)).view(
        len(dense), -1, code.columns
    )
    most = wide.abs().amax(-1, keepdim=True).expand_as(wide).flatten(1)[:, :cols]
    step = most / code.largest
    relative = torch.maximum(dense.abs() / 16, step * 2**-10)
    bound = relative if code.values == "fp8" else step / 2
    bound = bound * (1 + 2**-7) + most * 2**-9 + dense.abs() * 2**-8
    assert bool(((dense - back).abs() <= bound + 1e-37).all())


@every_format
@every_dtype
def test_what_is_encoded_again_stays(name, dtype, seed):
    """Entries that have become 0 aside, which are none of the matrix that comes back."""
    dense = random((40, 700), 0.5, dtype)
    dense = torch.where(dense == 0, 0, dense.abs() + 0.5).to(dtype)
    back = decoded(name, dense)
    assert (back != 0).equal(dense != 0)
    if dtype != torch.bfloat16:  # whose rounded largest value may have another scale
        assert same_bits(decoded(name, back), back)


@every_format
def test_blocks_of_slabs(name, monkeypatch, seed):
    dense = random((100, 700), 0.3)
    dense[32:64] = 0
    wanted = encoded(name, dense)[1]
    for at_once in (1, 2 * 3 * 4096):
        monkeypatch.setattr(quantised_cpu, "AT_ONCE", at_once)
        found = encoded(name, dense)[1]
        assert all(torch.equal(found[n], wanted[n]) for n in found)
        assert decoded(name, dense).any()


@every_format
def test_data_that_begins_anywhere_is_read(name, seed):
    dense = random((33, 257))
    form, tensors, facts = encoded(name, dense)
    moved = torch.cat((torch.zeros(1, dtype=torch.uint8), tensors["data"]))[1:]
    found = form.decode({**tensors, "data": moved}, facts, (33, 257), dense.dtype)
    assert same_bits(found, form.decode(tensors, facts, (33, 257), dense.dtype))


# Groups that are rare.


def group(values, dtype):
    dense = torch.zeros(16, 256, dtype=dtype)
    dense[3, : len(values)] = torch.tensor(values, dtype=torch.float64).to(dtype)
    return dense


@every_format
@every_dtype
def test_groups_without_entries_have_the_scale_one(name, dtype):
    form, tensors, _ = encoded(name, torch.zeros(16, 256, dtype=dtype))
    scales = quantised_cpu.scales_at(tensors["data"], torch.zeros(1).long(), form.code)
    assert bool((scales == 1).all()) and not decoded(name, torch.zeros(16, 256)).any()


@every_format
@every_dtype
def test_what_is_not_finite_is_refused(name, dtype):
    for value in (math.nan, math.inf, -math.inf):
        dense = group([1.0, value, 2.0, value], dtype)
        message = f"the matrix has 2 entries that are NaN or infinite, .*{name[7:]!r} cannot"
        with pytest.raises(ValueError, match=message):
            sparse.compress(dense, name)
        with pytest.raises(ValueError, match=r"torch\.nan_to_num"):
            sparse.compress(dense.to_sparse_csr(), name)
        with pytest.raises(ValueError, match=message):
            sparse.compress(dense, "bitmap").convert(name)


@every_format
@every_dtype
def test_the_largest_values_stay_finite(name, dtype):
    most = torch.finfo(dtype).max
    back = decoded(name, group([most, -most, most / 2, most / 100], dtype)).double()
    assert bool(back.isfinite().all())
    assert torch.allclose(back[3, :3], torch.tensor([1, -1, 0.5]).double() * most, rtol=0.15)


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_smallest_values_are_whole_steps_of_the_least_scale(name, dtype):
    values = [LEAST_SCALE * 3, -LEAST_SCALE, LEAST_SCALE / 8, 1e-45]
    back = decoded(name, group(values, dtype))[3, :4].double() / LEAST_SCALE
    wanted = [3, -1, 0.125 if name.endswith("fp8") else 0, 0]
    assert back.tolist() == wanted
    form, tensors, _ = encoded(name, group(values, dtype))
    assert form.stored(tensors) >= 3  # what becomes 0 stays an entry


@every_format
def test_half_types_smallest_values(name):
    """Subnormal in float16, which is none in the float32 that codes are made of."""
    back = decoded(name, group([6e-8, -6e-8, 6e-7], torch.float16))
    assert bool(back.isfinite().all()) and back[3, 2].item() == pytest.approx(6e-7, rel=0.06)


@every_format
def test_flushed_subnormals(name):
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    try:
        dense = torch.full((17, 300), 1, dtype=torch.int32).view(torch.float32)
        form, tensors, _ = encoded(name, dense)
        assert form.stored(tensors) == 17 * 300 and not decoded(name, dense).any()
    finally:
        torch.set_flush_denormal(False)


# What is refused.


def broken(name, change):
    """A matrix of two chunks, the second empty, after ``change(tensors, facts)``."""
    dense = torch.zeros(16, 512, dtype=torch.float16)
    dense[:, 3] = 1
    form, tensors, facts = encoded(name, dense)
    change(tensors, facts)
    return form, tensors, facts


WRONG = {
    "data must have dtype torch.uint8": lambda t, f: t.update(data=t["data"].view(torch.int8)),
    r"offsets must have shape \(3,\)": lambda t, f: t.update(offsets=t["offsets"][:2]),
    "data must have one dimension": lambda t, f: t.update(data=t["data"][None]),
    "offsets must begin with 0": lambda t, f: t["offsets"].add_(1),
    "and grow by .* to .* from": lambda t, f: t["offsets"][1].sub_(4),
    "data must have .* bytes, got": lambda t, f: t.update(data=t["data"][:-16]),
    "the fact largest must be .*, got 16": lambda t, f: f.update(largest=16),
    "each bit: 1 of 2 chunks are": lambda t, f: t["data"][-560:-500].fill_(255),
    "scales that are finite and above 0, 1 are": lambda t, f: t["data"][512:514].fill_(255),
    "and above 0, 16 are others": lambda t, f: t["data"][512:544].fill_(0),
}


@every_format
@pytest.mark.parametrize("message", WRONG)
def test_loaded_tensors_are_checked(name, message):
    form, tensors, facts = broken(name, WRONG[message])
    with pytest.raises(ValueError, match=message):
        form.check(tensors, facts, (16, 512), torch.float16)


@every_format
@pytest.mark.parametrize("shape", [(16, 300), (17, 256), (5, 7), (40, 700)], ids=str)
def test_bits_beyond_the_edges_are_refused(name, shape, seed):
    rows, cols = (-(-size // step) * step for size, step in zip(shape, (16, 256), strict=True))
    for place in ((0, shape[1]), (shape[0], 0), (rows - 1, cols - 1)):
        if place[0] >= rows or place[1] >= cols:
            continue
        dense = random((rows, cols), 0.3)
        dense[shape[0] :], dense[:, shape[1] :] = 0, 0
        form, tensors, facts = encoded(name, dense)
        form.check(tensors, facts, shape, torch.float16)
        dense[place] = 1
        form, tensors, facts = encoded(name, dense)
        with pytest.raises(ValueError, match="data must have no bits set beyond the matrix's"):
            form.check(tensors, facts, shape, torch.float16)


@every_format
def test_what_offsets_do_not_reach_is_refused(name, monkeypatch, seed):
    dense = random((40, 600))
    monkeypatch.setattr(bitmap, "MOST_BYTES", 4000)
    form, entries = quantised.FORMATS[name], torch_layouts.of_tensor(dense.to_sparse_csr())
    assert form.nbytes(dense) is None and form.measure_entries(entries) is None
    for encode in (lambda: form.encode(dense), lambda: form.encode_entries(entries)):
        with pytest.raises(UnsupportedError, match="its offsets reach 32 GiB"):
            encode()
