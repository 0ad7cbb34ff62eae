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
