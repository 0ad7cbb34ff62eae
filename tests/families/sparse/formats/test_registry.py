"""The formats by name, the rates of their products, and the one that is chosen."""

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


# Rows, columns, density, vectors; microseconds on an H100 by cuBLAS and by the fastest format,
# those of more than 16 vectors on an H200.
MEASURED = [
    ((4219, 1128), 0.126, 14, 13.7, ("u8", 9.4)),
    ((9788, 688), 0.06, 10, 15.6, ("u8", 9.8)),
    ((7101, 1927), 0.017, 4, 29.2, ("u8", 10.7)),
    ((3308, 6761), 0.124, 1, 28.4, ("u4", 12.3)),
    ((13350, 11985), 0.101, 27, 284.9, ("bitmap", 75.8)),
    ((646, 7227), 0.017, 15, 14.1, ("u8", 11.6)),
    ((1456, 6607), 0.062, 29, 22.7, ("bitmap", 13.9)),
    ((8271, 188), 0.99, 2, 5.2, ("dense", 5.2)),
    ((2188, 4135), 0.064, 33, 28.3, ("bitmap", 15.7)),
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
    measured = formats.measured

    def stand_in(dense):
        real, density = measured(dense)
        every = {**real, **sizes}
        return {name: every[name] for name in formats.FORMATS if every.get(name)}, density

    monkeypatch.setattr(formats, "measured", stand_in)
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


@pytest.mark.few(1)
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
    assert formats.auto(random(0.05, shape=(64, 4095)), 65) == "dense"
    for columns in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="columns must be a positive int"):
            formats.auto(dense, columns)
