"""The formats u8, u4 and u2 on CPU tensors: against a scalar encoder, and what `check` refuses."""

import math

import pytest
import torch

from kernlib.families.sparse.formats import slices
from kernlib.families.sparse.formats import slices_cpu as cpu
from kernlib.families.sparse.formats.tiling import Tiling
from kernlib.families.sparse.matrix import SparseMatrix

BITS = {2: torch.int16, 4: torch.int32}
U8, U4, U2 = (slices.FORMATS[name] for name in ("u8", "u4", "u2"))
every_format = pytest.mark.parametrize("form", (U8, U4, U2), ids=("u8", "u4", "u2"))


def matrix(rows, cols, density, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=generator).to(dtype)
    kept = torch.rand(rows, cols, generator=generator) < density
    return torch.where(kept, values, torch.zeros((), dtype=dtype))


def bits(t):
    return t.view(BITS[t.element_size()])


def same(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def codes_of(row, first, longest):
    """(value bits, step) of each code of a row of a panel, written down one by one."""
    found, last, zeros = [], first, (0, -(2**15), -(2**31))
    for column, value in enumerate(row, first):
        if value not in zeros:
            while column - last > longest:
                found.append((0, longest))
                last += longest
            found.append((value, column - last))
            last = column
    return found


def codes_of_u2(row, first):
    """The same of u2, one code less than it takes at the least for each step of it."""
    found, last = [], first - 1
    for column, value in enumerate(row, first):
        if value not in (0, -(2**15), -(2**31)):
            count = -(-(column - last) // 4)
            found.append((value, column - last, count))
            last = column
    return found


def filled_u2(entries, length):
    """(value bits, step bits) of the codes of a row of u2, as many as its slice has: those that it
    lacks go, one by one, to the first entries whose steps can be divided."""
    lacking, made = length - sum(count for _, _, count in entries), []
    for value, step, count in entries:
        more = min(lacking, step - count)
        lacking, count = lacking - more, count + more
        rest = step - count
        for index in range(count):
            made.append((value if index == count - 1 else 0, min(rest, 3)))
            rest -= min(rest, 3)
    return made + [(0, 0)] * lacking


def step_bytes(steps, bits):
    """Bytes of a lane's steps in a group."""
    count = len(steps) * bits // 8
    parts = [steps[at : at + count] for at in range(0, len(steps), count)]
    return bytes(
        sum(s << bits * i for i, s in enumerate(held)) for held in zip(*parts, strict=True)
    )


def part_bytes(lanes, size, bits_of_step):
    """Bytes of the codes of 32 lanes, group by group."""
    data, at, length = b"", 0, len(lanes[0])
    whole = 16 if bits_of_step == 2 else 8
    rest = [s for s in (8, 4, 2, 1) if s < whole and length & s]
    for count in [whole] * (length // whole) + rest:
        groups = [lane[at : at + count] for lane in lanes]
        for begin in range(0, count, 8):
            data += b"".join(
                v.to_bytes(size, "little", signed=True)
                for group in groups
                for v, _ in group[begin : begin + 8]
            )
        for group in groups:
            data += step_bytes([step for _, step in group], bits_of_step)
        at += count
    return data


def reversed_bits(slices):
    width = (slices - 1).bit_length()
    turned = [int(format(i, f"0{width}b")[::-1], 2) if width else 0 for i in range(2**width)]
    return [i for i in turned if i < slices]


def starts_of(lane, length, least):
    """Where the parts of a lane begin, each of so many codes: the sum of the steps before."""
    steps = [step + least for _, step in lane]
    return [sum(steps[:at]) for at in range(0, len(lane), max(1, length))]


def scalar_encode(dense, tiling, bits_of_step):
    """Bytes of data, offsets, rows and starts of parts by loops over single codes."""
    size, (rows, cols), (width, parts) = dense.element_size(), dense.shape, tiling
    values, data, offsets, held = bits(dense).tolist(), b"", [0], []
    for first in range(0, cols, width):
        longest = 2**bits_of_step - 1
        lines = [codes_of(line[first : first + width], first, longest) for line in values]
        counts, unit = [len(line) for line in lines], parts * (8 // bits_of_step)
        if bits_of_step == 2:
            lines = [codes_of_u2(line[first : first + width], first) for line in values]
            counts = [sum(count for _, _, count in line) for line in lines]
        order = sorted(range(rows), key=lambda r: (-counts[r], r))
        for group in reversed_bits(-(-rows // 32)):
            mine = order[32 * group : 32 * group + 32]
            length = -(-counts[mine[0]] // unit) * unit
            if bits_of_step == 2:
                padded = [filled_u2(lines[r], length) for r in mine]
            else:
                padded = [lines[r] + [(0, 0)] * (length - counts[r]) for r in mine]
            padded += [[(0, 0)] * length] * (32 - len(mine))
            data += b"".join(
                part_bytes([lane[at : at + length // parts] for lane in padded], size, bits_of_step)
                for at in range(0, length, max(1, length // parts))
            )
            offsets.append(offsets[-1] + length)
            held.append(mine + [-1] * (32 - len(mine)))
            if parts > 1:
                starts = [starts_of(lane, length // parts, bits_of_step == 2) for lane in padded]
                held[-1] += [start for part in zip(*starts, strict=True) for start in part]
                held[-1] += [0] * (32 * (1 + parts) - len(held[-1]))  # of a slice without codes
    return data, offsets, held


CASES = [
    (5, 32, 0.3, Tiling(32)), (70, 300, 0.1, Tiling(128)), (33, 700, 0.002, Tiling(512)),
    (97, 260, 0.6, Tiling(256)), (40, 100, 1.0, Tiling(64)), (64, 600, 0.0, Tiling(512)),
    (1, 1, 1.0, Tiling(512)), (31, 1500, 0.01, Tiling(1024)), (70, 300, 0.1, Tiling(304, 3)),
    (97, 700, 0.002, Tiling(704, 5)), (40, 100, 1.0, Tiling(112, 32)), (64, 90, 0.0, Tiling(96, 2)),
    (33, 701, 0.5, Tiling(704, 8)),
]  # fmt: skip


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_encoding_is_that_of_a_scalar_encoder(case, dtype, form):
    rows, cols, density, tiling = case
    dense = matrix(rows, cols, density, dtype)
    tensors, facts = form.encode(dense, tiling)
    data, offsets, held = scalar_encode(dense, tiling, form.code.bits)
    assert facts == tiling.facts and tuple(tensors) == form.TENSORS
    assert bytes(tensors["data"].tolist()) == data
    assert tensors["offsets"].tolist() == offsets
    parts = cpu.numbers(tensors["rows"]).unsqueeze(2), cpu.starts(tensors["rows"])
    assert torch.cat(parts, 2).flatten(2).flatten(0, 1).tolist() == held
    form.check(tensors, facts, (rows, cols), dtype)
    assert same(form.decode(tensors, facts, (rows, cols), dtype), dense)


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_bit_comes_back(dtype, form):
    dense = matrix(50, 2100, 0.05, dtype)
    dense[0] = 0
    dense[1] = 1
    dense[3, 5], dense[3, 2099], dense[4, 0] = math.nan, math.inf, -math.inf
    bits(dense)[5, 7] = torch.iinfo(BITS[dense.element_size()]).max - 3  # a NaN of its own
    bits(dense)[6, 7] = 1  # subnormal
    tensors, facts = form.encode(dense)
    form.check(tensors, facts, dense.shape, dtype)
    assert same(form.decode(tensors, facts, dense.shape, dtype), dense)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert size == form.nbytes(dense) == form.measure(dense, None)


@every_format
def test_minus_zero_is_no_entry(form):
    dense = matrix(70, 300, 0.2)
    pruned = torch.where(dense == 0, torch.tensor(-0.0, dtype=dense.dtype), dense)
    ours, theirs = form.encode(pruned)[0], form.encode(dense)[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in form.TENSORS)


@every_format
def test_more_rows_than_two_bytes_count(form):
    dense = torch.zeros(70_000, 16, dtype=torch.float16)
    dense[66_000, 3], dense[69_999, 0], dense[2, 15] = 1, 2, 3
    tensors, facts = form.encode(dense)
    assert tensors["rows"].dtype == torch.int32
    assert same(form.decode(tensors, facts, dense.shape, dense.dtype), dense)
    short = dense[:65_535]
    tensors, facts = form.encode(short)
    assert tensors["rows"].dtype == torch.uint8
    form.check(tensors, facts, short.shape, short.dtype)
    assert same(form.decode(tensors, facts, short.shape, short.dtype), short)


@every_format
def test_check_names_what_is_wrong(form):
    dense = matrix(70, 300, 0.1)
    tensors, facts = form.encode(dense, Tiling(128))

    def refused(words, given=tensors, shape=(70, 300), facts=facts):
        with pytest.raises(ValueError, match=words):
            form.check(given, facts, shape, torch.float16)

    refused("has the tensors", {"data": tensors["data"]})
    refused("has the facts width, parts, got 'a b' too", facts={"width": 128, "a b": 3})
    refused("width", facts={"width": 100})
    refused("width", facts={"width": 4096})
    refused("data must have", {**tensors, "data": tensors["data"].view(torch.int8)})
    refused("offsets must have shape", shape=(70, 700))
    refused("rows must have shape", {**tensors, "rows": tensors["rows"][:, :2].contiguous()})
    refused("offsets must rise", {**tensors, "data": tensors["data"][:-96]})
    refused("offsets must rise", {**tensors, "data": tensors["data"].view(-1, 2)})
    refused("offsets must rise", {**tensors, "offsets": tensors["offsets"].flip(0)})
    refused("rows must be those", {**tensors, "rows": tensors["rows"] + 60})


@every_format
def test_states_by_which_kernels_would_leave_memory_are_refused(form):
    dense = matrix(70, 300, 0.1)
    tensors, facts = form.encode(dense, Tiling(128))

    def refused(words, **changed):
        with pytest.raises(ValueError, match=words):
            form.check({**tensors, **changed}, facts, (70, 300), torch.float16)

    refused("steps to 128 columns", data=tensors["data"] | 0xFF)
    twice = tensors["rows"].clone()
    held = twice.view(torch.int16)[1]
    held[held == 5] = 6
    refused("rows must be those", rows=twice)
    refused("rows must be those", rows=torch.full_like(twice, 255))
    refused("rows must be those", rows=torch.zeros_like(twice))
    behind = tensors["rows"].clone()
    none = behind.view(torch.int16)[behind.view(torch.int16) == -1]
    behind.view(torch.int16)[behind.view(torch.int16) == -1] = torch.full_like(none, 70)
    refused("rows must be those", rows=behind)  # row 70 of 70, which would be written behind out
    # A code's value beyond the last column, within the last panel's width: x does not lie there.
    beyond = form.encode(matrix(70, 360, 0.5), Tiling(128))[0]
    with pytest.raises(ValueError, match="steps to 128 columns of a panel, 44 of the last one"):
        form.check(beyond, facts, (70, 300), torch.float16)
    wrapped = tensors["offsets"].clone()
    wrapped[1:4] = torch.tensor([2**31 - 4, -(2**31), -4])
    refused("offsets must rise", offsets=wrapped)


@every_format
def test_parts_that_begin_elsewhere_are_refused(form):
    """From there a kernel would read x beyond its end."""
    dense = matrix(70, 300, 0.3)
    tensors, facts = form.encode(dense, Tiling(304, 3))

    def refused(words, facts=facts, shape=(70, 300), **changed):
        with pytest.raises(ValueError, match=words):
            form.check({**tensors, **changed}, facts, shape, torch.float16)

    moved = tensors["rows"].clone()
    moved.view(torch.int16)[0, 1, 64 + 5] += 1
    refused("rows must say, behind the rows, where the steps", rows=moved)
    refused("rows must say, behind the rows, where the steps", data=tensors["data"] | 0xFF)
    beyond, facts_there = form.encode(matrix(70, 304, 1.0), Tiling(304, 3))
    with pytest.raises(ValueError, match="steps to 288 columns of a panel, 280 of the last one"):
        form.check(beyond, facts_there | {"width": 288}, (70, 280), torch.float16)
    refused("fact parts must be from 1 to 32, got 33", facts={"width": 304, "parts": 33})
    refused("fact parts must be from 1 to 32, got 0", facts={"width": 304, "parts": 0})
    refused("fact width must be 304, all columns", facts={"width": 320, "parts": 3})
    refused("rows must have shape", facts={"width": 304, "parts": 4})
    odd = tensors["offsets"].clone()
    odd[1] -= 1
    refused(f"by multiples of {3 * form.code.unit}", offsets=odd)


@every_format
def test_files_of_before_have_no_parts(form):
    dense = matrix(70, 300, 0.3)
    tensors, facts = form.encode(dense, Tiling(128))
    assert facts == {"width": 128, "parts": 1}
    form.check(tensors, {"width": 128}, (70, 300), torch.float16)
    assert same(form.decode(tensors, {"width": 128}, (70, 300), torch.float16), dense)
    header, state = SparseMatrix(form.FORMAT, (70, 300), dense.dtype, tensors, facts).state()
    matrix_of_before = SparseMatrix.from_state({**header, "facts": {"width": 128}}, state)
    assert same(matrix_of_before.to_dense(), dense)


@every_format
def test_tensors_lie_in_one(form):
    dense = matrix(70, 300, 0.3)
    tensors, facts = form.encode(dense)
    operands = tuple(tensors.values())
    joined = form.joined(operands, facts, (70, 300))
    again = form.split(joined, facts, (70, 300))
    for ours, other in zip(operands, again, strict=True):
        assert torch.equal(ours, other) and ours.data_ptr() == other.data_ptr()
    apart = tuple(t.clone() for t in operands)
    assert form.joined(apart, facts, (70, 300)) is None
    together = form.together(apart, facts, (70, 300))
    assert torch.equal(form.joined(together, facts, (70, 300)), joined)
    with pytest.raises(ValueError, match="takes more than 40 bytes"):
        form.split(joined[:40], facts, (70, 300))


@pytest.mark.parametrize("form, unit", [(U4, 2), (U2, 4)], ids=["u4", "u2"])
def test_lengths_are_whole_bytes_of_steps(form, unit):
    tensors, facts = form.encode(matrix(70, 300, 0.1), Tiling(128))
    assert not (tensors["offsets"] % unit).any()
    odd = tensors["offsets"].clone()
    odd[1] -= 1
    with pytest.raises(ValueError, match=f"multiples of {unit}"):
        form.check({**tensors, "offsets": odd}, facts, (70, 300), torch.float16)


def test_codes_of_u2_stay_in_their_panel(seed):
    """Rows of any lengths in one slice: the products' addresses are those of the codes."""
    width = 64
    dense = torch.ones(32, width, dtype=torch.float16)
    for row in range(1, 32):
        kept = torch.rand(width) < torch.rand(())
        kept[: torch.randint(width + 1, ())] = False
        dense[row] = kept
    dense[30], dense[31] = 0, 0
    dense[31, width - 1] = 1
    tensors, facts = U2.encode(dense, Tiling(width))
    assert tensors["offsets"].tolist() == [0, width]
    number, lane = torch.arange(width)[:, None], torch.arange(32)
    length = torch.full_like(number, width)
    _, step, shift = cpu.places(U2.code, number, length, lane, 2)
    last = (tensors["data"][step] >> shift & 3).sum(0) + width - 1
    assert bool((last == width - 1).all())
    assert same(U2.decode(tensors, facts, dense.shape, dense.dtype), dense)


@every_format
def test_sizes_past_32_bits_are_refused(form):
    for shape in ((2**31, 0), (0, 2**31)):
        dense = torch.empty(shape, dtype=torch.float16)
        assert form.nbytes(dense) is None
        with pytest.raises(ValueError, match="holds 2147483647 rows or columns at most"):
            form.encode(dense)
        tensors, facts = form.encode(torch.empty(0, 0, dtype=torch.float16))
        with pytest.raises(ValueError, match="sizes up to 2147483647"):
            form.check(tensors, facts, shape, torch.float16)
