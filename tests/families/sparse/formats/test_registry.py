"""The formats by name, the rates of their products, and the one that is chosen."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernlib.families.sparse.formats import bitmap
from kernlib.families.sparse.formats import dense as dense_format
from kernlib.families.sparse.formats import registry as formats
from kernlib.families.sparse.formats.encoding import BITS
from kernlib.families.sparse.lowering import rates
from kernlib.jit import targets

DTYPES = tuple(BITS)
HALVES = (torch.float16, torch.bfloat16)


def total_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors.values())


def test_formats_by_name():
    for name in ("bitmap", "dense"):
        module = formats.format_of(name)
        assert name == module.FORMAT and name in formats.FORMATS
    with pytest.raises(
        ValueError, match="one of 'bitmap', 'u8', 'u4', 'u2', 'macko', 'dense', got 'csr'"
    ):
        formats.format_of("csr")


def test_a_format_is_loaded_when_it_is_asked_for():
    code = """
import sys
from kernlib.families.sparse.formats import registry
here = "kernlib.families.sparse.formats."
known = {here + name for name in ("registry", "encoding")}
assert not [name for name in sys.modules if name.startswith(here) and name not in known]
assert "kernlib.runtime.devices" not in sys.modules
import torch
module = registry.format_of("bitmap")
tensors, facts = module.encode(torch.eye(4))
module.decode(tensors, facts, (4, 4), torch.float32)
assert "kernlib.runtime.devices" not in sys.modules and here + "u8" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (1, 1), (33, 257)], ids=str)
def test_the_dense_format(shape, dtype, seed):
    whole = torch.randn(shape[1], shape[0]).to(dtype)
    for dense in (whole.T, whole.T.contiguous()):
        tensors, facts = dense_format.encode(dense)
        assert tuple(tensors) == dense_format.TENSORS and facts == {}
        dense_format.check(tensors, facts, shape, dtype)
        assert dense_format.nbytes(dense) == total_bytes(tensors)
        found = dense_format.decode(tensors, facts, shape, dtype)
        assert found.is_contiguous() and torch.equal(found, dense)
        for copy in (found, tensors["values"]):  # neither shares memory with the other
            copy.zero_()
        assert not dense.numel() or (dense != 0).any()


def test_the_dense_format_checks_its_tensors():
    values = torch.zeros(4, 6)
    for given, message in [
        ({}, "has the tensors values, got none"),
        ({"values": values.half()}, "values must have dtype torch.float32"),
        ({"values": values.T}, "values must be contiguous"),
        ({"values": values[:3]}, r"values must have shape \(4, 6\), got \(3, 6\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            dense_format.check(given, {}, (4, 6), torch.float32)


# Rates.


def test_every_format_has_rates_wherever_there_are_some():
    assert rates.DEFAULT in rates.RATES
    for arch, known in rates.RATES.items():
        assert arch in targets.SHARED_BYTES
        assert list(known) == sorted(known) and max(known) == rates.MOST_COLUMNS
        for formats_known in known.values():
            assert set(formats_known) == set(formats.FORMATS)
            for points in formats_known.values():
                densities = [rate.density for rate in points]
                assert densities and densities == sorted(set(densities))
                assert all(0 <= rate.density <= 1 for rate in points)
                assert all(rate.fixed_us > 0 and 0.1 < rate.tb_per_s < 10 for rate in points)


@pytest.fixture
def table(monkeypatch):
    points = (rates.Rate(0.1, 2.0, 1.0), rates.Rate(0.5, 4.0, 3.0))
    known = {name: (rates.Rate(0.0, 1.0, 4.0),) for name in formats.FORMATS}
    known["bitmap"] = points
    monkeypatch.setattr(rates, "RATES", {"sm_90a": {rates.MOST_COLUMNS: known}})
    return known


def test_rates_are_interpolated(table):
    megabyte = 10**6  # 1 us at 1 TB/s
    for density, wanted in [
        (0.0, 2 + 1), (0.1, 2 + 1), (0.3, 3 + 1 / 2), (0.2, 2.5 + 1 / 1.5), (0.5, 4 + 1 / 3),
        (1.0, 4 + 1 / 3),
    ]:  # fmt: skip
        assert rates.microseconds("bitmap", "sm_90a", density, megabyte) == pytest.approx(wanted)
    assert rates.microseconds("dense", "sm_80", 0.3, megabyte) == pytest.approx(1.25)


def test_rows_of_no_whole_16_bytes_cost_a_copy_of_x(table):
    sparse = partial(rates.microseconds, "u4", "sm_90a", 0.5, 10**6)
    for columns in (1, 8):
        assert sparse(columns, 128) == sparse(columns, 144) == sparse(columns)
        assert sparse(columns, 1000) == pytest.approx(sparse() + rates.PADDING_US)


def test_cublas_has_its_rates_for_rows_of_whole_128_bytes(table):
    dense = partial(rates.microseconds, "dense", "sm_90a", 0.5, 10**6)
    assert dense(1, 128) == dense() == dense(8) == dense(8, 1280) == pytest.approx(1.25)
    one, several = rates.ONE, rates.SEVERAL
    assert dense(1, 1000) == pytest.approx(one.fixed + one.megabyte + one.row)
    assert dense(8, 1000) == pytest.approx(
        several.fixed + several.megabyte + several.row + several.first
    )
    assert dense(8, 1002) > dense(8, 1000) + 0.2  # no whole 4 bytes
    assert dense(8, 5000) == pytest.approx(dense(8, 4000) + several.row)


def test_codes_of_a_lane_take_their_time_where_bytes_take_less():
    for name in formats.SLICES:
        time = partial(rates.microseconds, name, "sm_90a", 0.5, row=2056)
        assert time(10**7) == time(10**7, width=300)  # whose bytes take longer
        for columns, code in ((1, 0.012), (2, 0.012), (3, 0.015), (8, 0.018), (16, 0.02)):
            bare = time(0, columns)
            assert time(10**5, columns, width=1024) == pytest.approx(bare + 512 * code)
        assert time(10**5, 17) == time(10**5, 17, width=1024)  # decoded
        assert time(10**5, row=1024) == time(10**5, row=1024, width=1024)  # not measured
    for name in ("bitmap", "macko", "dense"):
        time = partial(rates.microseconds, name, "sm_90a", 0.5, 10**5, row=1000)
        assert time() == time(width=1024)


def test_few_rows_and_vectors_are_summed_in_one_piece_by_cublas():
    """Of rows that are no whole 16 bytes, in half types."""

    def time(rows, cols, columns, itemsize=2):
        row = cols * itemsize
        given = "dense", "sm_90a", 1.0, rows * row, columns, row, itemsize
        return rates.microseconds(*given)

    whole = rates.LAUNCH_US + 1661 * rates.TERM_US
    for rows, columns in ((64, 3), (77, 2), (128, 8)):
        assert time(rows, 1661, columns) == pytest.approx(whole)
        assert time(rows, 1661, columns, itemsize=4) < whole / 2
        assert time(rows, 1672, columns) < whole / 2
    for rows, columns in ((129, 3), (77, 1), (77, 9)):
        assert time(rows, 1661, columns) < whole / 2
    assert time(77, 51, 3) > rates.LAUNCH_US + 51 * rates.TERM_US


# Rows, columns, density, vectors; microseconds on an H100 by cuBLAS and by the fastest format.
MEASURED = [
    ((4219, 1128), 0.126, 14, 13.7, ("u8", 9.4)),
    ((9788, 688), 0.06, 10, 15.6, ("u8", 9.8)),
    ((7101, 1927), 0.017, 4, 29.2, ("u8", 10.7)),
    ((3308, 6761), 0.124, 1, 28.4, ("u4", 12.3)),
    ((13350, 11985), 0.101, 27, 284.5, ("bitmap", 135.8)),
    ((646, 7227), 0.017, 15, 14.1, ("u8", 11.6)),
    ((1456, 6607), 0.062, 29, 22.9, ("dense", 22.9)),
    ((8271, 188), 0.99, 2, 5.2, ("dense", 5.2)),
    ((2188, 4135), 0.064, 33, 27.4, ("dense", 27.4)),
    ((789, 2242), 0.107, 6, 9.0, ("dense", 9.0)),
    ((252, 2175), 0.094, 1, 4.4, ("dense", 4.4)),
    ((381, 104), 0.065, 3, 3.8, ("dense", 3.8)),
    ((77, 1661), 0.251, 3, 21.9, ("bitmap", 10.8)),
    ((67, 1420), 0.539, 5, 20.6, ("bitmap", 11.1)),
    ((90, 1218), 0.03, 11, 6.1, ("dense", 6.1)),
    ((473, 2682), 0.279, 3, 8.4, ("dense", 8.4)),
    ((1612, 3130), 0.367, 1, 9.1, ("dense", 9.1)),
    ((1277, 619), 0.844, 1, 3.8, ("dense", 3.8)),
    ((3016, 4367), 0.231, 3, 26.0, ("u4", 14.4)),
    ((144, 8085), 0.05, 1, 9.0, ("u8", 8.1)),
]


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_fastest_of_what_was_measured(case, seed):
    """Bytes are those of some of the rows."""
    (rows, cols), density, columns, cublas, (fastest, _) = case
    given = (torch.rand(min(rows, 96), cols) < density).half()
    sizes, found = formats.measured(given)
    sizes = {name: size * rows // len(given) for name, size in sizes.items()}
    most = min(columns, rates.MOST_COLUMNS)
    taken = formats.fastest(sizes, found, (rows, cols), 2, "sm_90a", most)
    taken = "dense" if columns > rates.MOST_COLUMNS else taken
    assert taken == fastest or {taken, fastest} == {"u8", "u4"}  # which are as fast
    dense = rates.microseconds("dense", "sm_90a", found, sizes["dense"], most, 2 * cols)
    assert 0.65 < dense / cublas < 1.5


# The choice.


@pytest.fixture
def others(monkeypatch):
    """Bytes of the formats u8, u4, u2 and macko, which stand-ins answer."""
    sizes = {"u8": None, "u4": None, "u2": None, "macko": None}
    find = formats.format_of
    made = {name: SimpleNamespace(nbytes=lambda d, n=name: sizes[n]) for name in sizes}
    monkeypatch.setattr(formats, "format_of", lambda name: made.get(name) or find(name))
    return sizes


def random(density, dtype=torch.float16, shape=(1024, 2048)):
    return torch.randn(shape).masked_fill(torch.rand(shape) >= density, 0).to(dtype)


def test_bytes_of_all_formats_and_density(others, seed):
    dense = random(0.3)
    others["u8"] = 12345
    sizes, density = formats.measured(dense)
    assert list(sizes) == ["bitmap", "u8", "dense"] and sizes["u8"] == 12345
    assert sizes["bitmap"] == bitmap.nbytes(dense) == total_bytes(bitmap.encode(dense)[0])
    assert sizes["dense"] == dense.numel() * 2
    assert density == int((dense != 0).sum()) / dense.numel()


def test_negative_zeros_of_pruning_are_not_counted(others, seed):
    kept = torch.rand(300, 1000) < 0.3
    dense = torch.randn(300, 1000).half() * kept
    sizes, density = formats.measured(dense)
    assert sizes["bitmap"] == bitmap.nbytes(dense.masked_fill(~kept, 0))
    assert density == int((dense != 0).sum()) / dense.numel()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_fewest_bytes_of_all_formats_at_one_rate(table, dtype, seed):
    table["bitmap"] = table["dense"]
    for density in (0.02, 0.2, 0.5, 1.0):
        dense = random(density, dtype, (300, 1024))
        taken = {}
        for name in formats.FORMATS:
            module = formats.format_of(name)
            if module.nbytes(dense) is not None:
                taken[name] = total_bytes(module.encode(dense)[0])
                assert module.nbytes(dense) == taken[name], name
        assert formats.measured(dense)[0] == taken
        assert formats.auto(dense) == min(taken, key=taken.get)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bitmap_below_nine_tenths_and_dense_above(others, table, dtype, seed):
    table["bitmap"] = table["dense"]
    assert formats.auto(random(0.5, dtype)) == "bitmap"
    assert formats.auto(random(0.5, dtype).T) == "bitmap"
    assert formats.auto(random(1.0, dtype)) == "dense"


def test_of_formats_that_are_as_fast_the_one_of_fewest_bytes_is_taken():
    sizes = {"u8": 10**5, "u4": 90_000, "u2": 95_000}  # which take less time than codes do
    assert formats.fastest(sizes, 0.5, (64, 2000), 2, "sm_90a", 1) == "u4"


def test_a_format_that_cannot_hold_the_matrix_is_not_chosen(others, table, monkeypatch, seed):
    dense = random(0.05)
    others.update(u8=1)
    assert formats.auto(dense) == "u8"
    others.update(u8=None, macko=1)
    assert formats.auto(dense) == "macko"
    others.update(macko=None)
    table["bitmap"] = table["dense"]
    assert formats.auto(dense) == "bitmap"
    monkeypatch.setattr(bitmap, "MOST_BYTES", 0)
    assert formats.auto(dense) == "dense"


def test_rates_decide_among_bytes(others, table, seed):
    dense = random(0.5)
    others.update(u8=10**6, macko=10**6)
    table["macko"] = (rates.Rate(0.0, 1.0, 4.1),)
    assert formats.auto(dense) == "macko"
    table["u8"] = (rates.Rate(0.0, 0.9, 4.0), rates.Rate(1.0, 0.9, 4.0))
    assert formats.auto(dense) == "u8"


def test_bitmap_is_not_chosen_for_what_its_kernels_do_not_take(others, table, seed):
    table["bitmap"] = table["dense"]
    assert formats.auto(random(0.5)) == "bitmap"
    assert formats.auto(random(0.5).float()) == "dense"


def test_columns_decide_among_formats(seed):
    large = (8192, 28672)

    def fastest(density, columns):
        entries = density * large[0] * large[1]
        sizes = {"bitmap": 2 * entries + large[0] * large[1] / 8, "u4": 2.5 * entries}
        return min(sizes, key=lambda n: rates.microseconds(n, "sm_90a", density, sizes[n], columns))

    assert [fastest(0.3, n) for n in (1, 2, 4, 5, 8, 16)] == [*["u4"] * 3, *["bitmap"] * 3]
    dense = random(0.3)
    assert formats.auto(dense, 1) == "u4" and formats.auto(dense, 16) == "dense"
    assert formats.auto(random(0.05), 17) == formats.auto(random(0.05), 1000) == "dense"
    assert formats.auto(random(0.05, shape=(64, 4095)), 33) == "dense"
    for columns in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="columns must be a positive int"):
            formats.auto(dense, columns)


def test_matrices_without_entries(others):
    for shape in [(0, 0), (0, 5), (5, 0), (1, 1), (300, 300)]:
        assert formats.auto(torch.zeros(shape)) in ("bitmap", "dense")


def test_a_choice_for_what_is_no_matrix_is_refused(others):
    with pytest.raises(ValueError, match="dense must be a matrix"):
        formats.auto(torch.zeros(2, 2, 2))
