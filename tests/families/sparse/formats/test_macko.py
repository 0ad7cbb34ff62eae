"""MACKO's format on the CPU, byte for byte against a loop over elements."""

from itertools import pairwise

import pytest
import torch

from kernlib.families.sparse.formats import macko
from tests.families.sparse.formats import macko_cases as cases

DENSITIES = (0.0, 0.003, 0.02, 0.1, 0.5, 1.0)
SHAPES = ((1, 1), (1, 200), (200, 1), (7, 33), (33, 17), (70, 256), (5, 1000))


@pytest.mark.parametrize("name", ("G1", "G2", "G3"))
def test_golden_vectors(name):
    dense, wanted = cases.golden()[name]
    tensors, facts = macko.encode(dense)
    assert cases.as_lists(tensors) == wanted == cases.encode_by_loop(dense)
    assert tuple(tensors) == macko.TENSORS
    assert [tensors[n].dtype for n in macko.TENSORS] == [torch.float16, torch.uint8, torch.int32]
    macko.check(tensors, facts, tuple(dense.shape), dense.dtype)
    found = macko.decode(tensors, facts, tuple(dense.shape), dense.dtype)
    if name != "G3":
        assert cases.same_bits(found, dense)
    else:
        assert found[3, 15].view(torch.int16) == -0x8000  # a pad stood on it
        assert found[4, 39].view(torch.int16) == 0x7FFF


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("density", DENSITIES)
def test_random_matrices(density, dtype, seed):
    for shape in SHAPES:
        for make in (cases.random, cases.peculiar):
            dense = make(*shape, density, dtype)
            tensors, facts = macko.encode(dense)
            values, _, row_ptr = wanted = cases.encode_by_loop(dense)
            assert cases.as_lists(tensors) == wanted, shape
            longest = max(b - a for a, b in pairwise(row_ptr))
            blocks = [*row_ptr[::32], row_ptr[-1]]
            busiest = max(b - a for a, b in pairwise(blocks))
            assert facts == {
                "entries": len(values),
                "longest": longest,
                "busiest": busiest,
                "nnz": int((dense != 0).sum()),
            }
            macko.check(tensors, facts, shape, dtype)
            found = macko.decode(tensors, facts, shape, dtype)
            assert found.is_contiguous()
            assert cases.same_bits(cases.canonical(found), cases.canonical(dense))
            size = sum(t.numel() * t.element_size() for t in tensors.values())
            assert macko.nbytes(dense) == size == int(macko.measure(dense))


def test_int64_rows_from_2_to_31_entries(seed, monkeypatch):
    dense = cases.random(20, 100, 0.3)
    narrow, facts = macko.encode(dense)
    monkeypatch.setattr(macko, "WIDE_FROM", 8)
    tensors, found = macko.encode(dense)
    assert tensors["row_ptr"].dtype == torch.int64 and found == facts
    assert torch.equal(tensors["row_ptr"], narrow["row_ptr"].long())
    macko.check(tensors, facts, (20, 100), torch.float16)
    assert torch.equal(macko.decode(tensors, facts, (20, 100), torch.float16), dense)
    assert macko.nbytes(dense) == sum(t.numel() * t.element_size() for t in tensors.values())


def test_finite_matrices_come_back_bit_by_bit(seed):
    dense = cases.random(65, 300, 0.07, torch.bfloat16)
    found = macko.decode(*macko.encode(dense), (65, 300), torch.bfloat16)
    assert cases.same_bits(found, dense)


@pytest.mark.parametrize("shape", ((0, 0), (0, 5), (5, 0), (3, 4)))
def test_without_entries(shape):
    tensors, facts = macko.encode(torch.zeros(shape, dtype=torch.float16))
    assert tensors["values"].shape == tensors["deltas"].shape == (0,)
    assert tensors["row_ptr"].tolist() == [0] * (shape[0] + 1)
    assert facts == {"entries": 0, "longest": 0, "busiest": 0, "nnz": 0}
    macko.check(tensors, facts, shape, torch.float16)
    assert macko.decode(tensors, facts, shape, torch.float16).shape == shape
    assert macko.nbytes(torch.zeros(shape)) == 4 * (shape[0] + 1)


def test_any_strides(seed):
    dense = cases.random(40, 90, 0.2)
    wanted = cases.as_lists(macko.encode(dense)[0])
    views = (
        dense.mT.contiguous().mT,
        torch.nn.functional.pad(dense, (1, 3, 2, 2))[2:-2, 1:-3],
        torch.repeat_interleave(dense, 2, 1)[:, ::2],
    )
    for view in views:
        assert cases.as_lists(macko.encode(view)[0]) == wanted
    row = cases.random(1, 50, 0.3)
    found = cases.as_lists(macko.encode(row.expand(4, 50))[0])
    assert found == cases.encode_by_loop(row.repeat(4, 1))


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match="dense must be a matrix"):
        macko.encode(torch.zeros(3))
    with pytest.raises(ValueError, match="float16, bfloat16, float32"):
        macko.encode(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="dense must be a tensor"):
        macko.encode([[1.0]])


def test_checks_of_loaded_tensors(seed):
    dense = cases.random(30, 100, 0.3)
    tensors, facts = macko.encode(dense)

    def refused(match, dtype=torch.float16, shape=(30, 100), given=None, **changed):
        with pytest.raises(ValueError, match=match):
            macko.check(tensors | changed, facts | (given or {}), shape, dtype)

    values, deltas, row_ptr = tensors.values()
    refused("values must have dtype", dtype=torch.bfloat16)
    refused("values must have shape", values=values[:-8])
    refused("deltas must have shape", deltas=deltas[:-1])
    refused("deltas must have dtype", deltas=deltas.view(torch.int8))
    refused("row_ptr must have dtype", row_ptr=row_ptr.long())
    refused("row_ptr must have shape", shape=(31, 100))
    refused("row_ptr must rise", row_ptr=row_ptr.flip(0))
    refused("row_ptr must rise", row_ptr=row_ptr + 1)
    refused("deltas must lead to 90 columns", shape=(30, 90))
    refused("deltas must lead to 100 columns", deltas=torch.full_like(deltas, 0xFF))
    refused("entries must be a multiple of 8", given={"entries": 3})
    refused("longest must be", given={"longest": 1})
    refused("busiest must be", given={"busiest": 1})
    refused("nnz must be", given={"nnz": facts["nnz"] + 1})
    refused("nnz must be", given={"nnz": 10**30})
    refused("has the facts .* got 'more' too", given={"more": 1})
    wrapped = row_ptr.clone()  # whose differences are positive as int32
    wrapped[1:4] = torch.tensor([2**31 - 1, -(2**31), -1])
    refused("row_ptr must rise .* falling in between", row_ptr=wrapped)
    refused("has the tensors values, deltas, row_ptr", data=values)
    refused("must be contiguous", values=values.repeat_interleave(2)[::2])


def test_passed_columns_are_sums_of_codes(seed):
    for density in (0.02, 0.3, 1.0):
        tensors, facts = macko.encode(cases.random(30, 100, density))
        entries = facts["entries"]
        deltas = tensors["deltas"].long()
        codes = torch.stack((deltas % 16, deltas // 16), 1).flatten()[:entries]
        wanted = torch.nn.functional.pad((codes + 1).cumsum(0), (1, 0))
        assert torch.equal(macko.passed(tensors["deltas"], torch.arange(entries + 1)), wanted)


def test_size_follows_the_formula(seed):
    for density in (0.1, 0.3, 0.7):
        share = macko.nbytes(cases.random(512, 4096, density)) / (2 * 512 * 4096)
        wanted = 1.25 * density / (1 - (1 - density) ** 16)
        assert share == pytest.approx(wanted, rel=0.02)
