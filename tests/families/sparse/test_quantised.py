"""Compressed matrices of values in fewer bits: what they take part in; and files of before."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib import sparse
from kernlib.families.sparse.layout import QUANTISED_VERSION, VERSION
from kernlib.families.sparse.matrix import rounded
from kernlib.families.sparse.packed import packed, unpacked
from kernlib.families.sparse.stacks import rows_of, stack
from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import SparseMatrix, compress
from tests.families.sparse.cases import DTYPES, QUANTISED, random, same_bits

VALUES = tuple(name.removeprefix("bitmap-") for name in QUANTISED)
FILE = Path(__file__).parent / "version_2.pt"
every_values = pytest.mark.parametrize("values", VALUES)


def made(values, rows=37, cols=300, dtype=torch.float16):
    dense = random(rows, cols, 0.5, dtype)
    return dense, compress(dense, values=values)


# Names.


@every_values
def test_a_format_and_values_name_one_format(values, seed):
    dense, w = made(values)
    name = f"bitmap-{values}"
    for given in (
        compress(dense, "bitmap", values=values),
        compress(dense, name),
        compress(dense, name, values=values),
        compress(dense.to_sparse_csr(), name),
        compress(dense, "u4").convert(name),
    ):
        assert given.format == name == w.format and given.layout == w.layout
        assert torch.equal(given.tensors["data"], w.tensors["data"])


@pytest.mark.parametrize("format", ["u8", "u4", "u2", "macko", "dense", "bitmap-fp8"])
def test_other_formats_have_no_such_values(format):
    linear = nn.Linear(8, 8)
    for call in (
        lambda: compress(torch.eye(8), format, values="int8"),
        lambda: SparseLinear.from_linear(linear, format=format, values="int8"),
        lambda: sparsify(nn.Sequential(linear), format=format, values="int8"),
    ):
        with pytest.raises(ValueError, match=f"alone, got format='{format}': pass format='auto'"):
            call()


@pytest.mark.parametrize("values", ["int2", "bitmap-int8", 8, ["int8"], torch.int8], ids=str)
def test_what_values_are_not_known(values):
    with pytest.raises(ValueError, match="values must be None or one of 'int8', 'fp8', 'int4'"):
        compress(torch.eye(8), values=values)


# What a matrix is.


@every_values
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_of_codes(values, dtype, seed):
    dense, w = made(values, dtype=DTYPES[dtype])
    assert w.dtype == dense.dtype == w.to_dense().dtype and w.to_dense().is_contiguous()
    assert w.nnz == int(dense.count_nonzero()) and w.version == QUANTISED_VERSION == 3
    assert SparseMatrix.from_layout(w.layout, w.operands).nnz == w.nnz
    plain = compress(dense, "bitmap")
    assert w.nbytes < plain.nbytes and f"format='bitmap-{values}'" in repr(w)
    x = torch.randn(3, 300).to(dense.dtype)
    wanted = sparse.matmul(compress(w.to_dense(), "dense"), x)
    assert torch.equal(sparse.matmul(w, x), wanted)


@every_values
def test_copies_states_and_packed_bytes(values, seed):
    _, w = made(values)
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    for other in (
        copy.deepcopy(w),
        pickle.loads(pickle.dumps(w)),
        torch.load(file, weights_only=True),
        SparseMatrix.from_state(*w.state()),
        unpacked(packed(w)),
    ):
        assert other.layout == w.layout and other.nnz == w.nnz
        assert all(torch.equal(other.tensors[n], w.tensors[n]) for n in w.tensors)
    header, tensors = w.state()
    for version in (1, 2, 4, True):
        message = f"header is of version {version}, this kernlib reads version 3 of such a format"
        with pytest.raises(ValueError, match=message):
            SparseMatrix.from_state({**header, "version": version}, tensors)


@every_values
def test_the_transpose_has_the_values_of_the_matrix(values, seed):
    _, w = made(values)
    turned = w.transpose()
    assert turned.format == "bitmap" and same_bits(turned.to_dense(), w.to_dense().t())
    assert turned.transpose() is w and turned.nnz == int(w.to_dense().count_nonzero())
    x = torch.randn(2, 300).half().requires_grad_()
    (grad,) = torch.autograd.grad(sparse.matmul(w, x).sum(), x)
    wanted = (torch.ones(2, 37) @ w.to_dense().float()).half()
    torch.testing.assert_close(grad, wanted, rtol=1e-2, atol=1e-2)


@every_values
def test_other_formats_and_dtypes_hold_its_values(values, monkeypatch, seed):
    from kernlib.families.sparse import matrix

    for most in (matrix.LAID_OUT_BYTES, 0):
        monkeypatch.setattr(matrix, "LAID_OUT_BYTES", most)
        _, w = made(values)
        for format in ("bitmap", "u8", "macko", "dense"):
            assert same_bits(w.convert(format).to_dense() + 0.0, w.to_dense() + 0.0)
        assert w.convert(w.format) is w
        wide = rounded(w, torch.float32)
        assert wide.format == w.format and wide.dtype == torch.float32
        assert torch.equal(wide.tensors["data"], w.tensors["data"]) and wide.nnz == w.nnz
        assert same_bits(wide.to_dense().half(), w.to_dense())
        assert same_bits(w.transpose().to_dense(), w.to_dense().t())


@pytest.mark.parametrize("values", [None, *VALUES])
def test_whole_slabs_are_stacked_as_they_are(values, seed):
    dense = [random(rows, 300, 0.5, torch.float16) for rows in (32, 16, 21)]
    parts = [compress(part, "bitmap", values=values) for part in dense]
    whole = stack(parts)
    assert whole.shape == (69, 300) and whole.nnz == sum(w.nnz for w in parts)
    assert same_bits(whole.to_dense(), torch.cat([w.to_dense() for w in parts]))
    SparseMatrix.from_state(*whole.state())
    first = 0
    for w in parts:
        some = rows_of(whole, first, w.shape[0])
        assert all(torch.equal(some.tensors[n], w.tensors[n]) for n in w.tensors)
        assert some.layout == w.layout
        first += w.shape[0]
    assert stack(parts[::-1]) is None and rows_of(whole, 8, 16) is None
    assert rows_of(whole, 16, 20) is None and stack([compress(torch.eye(16), "u8")]) is None


# Layers.


@every_values
def test_layers(values, seed):
    linear = nn.Linear(300, 32)
    layer = SparseLinear.from_linear(linear, density=0.5, values=values)
    assert layer.matrix.format == f"bitmap-{values}" and layer.matrix.density == 0.5
    half = copy.deepcopy(layer).half()
    assert half.matrix.dtype == torch.float16
    assert torch.equal(half.matrix.tensors["data"], layer.matrix.tensors["data"])
    for device in ("cpu", "meta"):
        empty = SparseLinear(300, 32, dtype=torch.float16, device=device)
        empty.load_state_dict(half.state_dict(), assign=device == "meta")
        assert empty.matrix.layout == half.matrix.layout
        assert torch.equal(empty.to_dense(), half.to_dense())
    x = torch.randn(2, 300)
    wanted = nn.functional.linear(x, layer.to_dense(), linear.bias)
    torch.testing.assert_close(layer(x), wanted)


@every_values
@pytest.mark.parametrize("rows", [32, 21])
def test_groups_hold_the_codes_of_their_layers(values, rows, seed):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(300, rows), nn.Linear(300, 40)

        def forward(self, x):
            return self.query(x), self.key(x)

    apart, joined = Attention().half(), Attention().half()
    joined.load_state_dict(apart.state_dict())
    sparsify(apart, density=0.5, values=values, fuse=False)
    layers = sparsify(joined, density=0.5, values=values, fuse=[["query", "key"]])
    held = layers["query"].joint.matrix
    assert held.format == f"bitmap-{values}" and held.shape == (rows + 40, 300)
    x = torch.randn(2, 300).half()
    for found, wanted in zip(joined(x), apart(x), strict=True):
        torch.testing.assert_close(found, wanted)
    if rows % 16 == 0:  # else the rows are quantised again, whose zeros are no entries
        states = apart.state_dict(), joined.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@every_values
def test_of_csr(values, seed):
    dense = random(21, 70)
    csr = dense.to_sparse_csr()
    parts = csr.crow_indices(), csr.col_indices(), csr.values()
    w = sparse.from_csr(*parts, (21, 70), format=f"bitmap-{values}")
    wanted = compress(dense, values=values)
    assert torch.equal(w.tensors["data"], wanted.tensors["data"]) and w.nnz == wanted.nnz


@every_values
def test_compiled_and_mapped_calls(values, seed):
    _, w = made(values, dtype=torch.float32)
    x = torch.randn(5, 300)
    wanted = sparse.matmul(w, x)
    program = torch.compile(lambda x: kl.run_kernel(kl.SparseMatmul(), w, x), backend="eager")
    assert torch.equal(program(x), wanted)
    torch.testing.assert_close(torch.vmap(lambda x: sparse.matmul(w, x))(x), wanted)


# Files of before. version_2.pt holds states that kernlib wrote when no values had fewer bits.


def files() -> dict:
    return torch.load(FILE, weights_only=True)


@pytest.mark.parametrize("format", ["bitmap", "u8", "u4", "u2", "macko", "dense"])
def test_states_of_before_load_and_are_still_written(format):
    found = files()
    header, tensors = found["states"][format]
    assert header["version"] == VERSION == 2
    w = SparseMatrix.from_state(header, tensors)
    assert same_bits(w.to_dense(), found["dense"].half())
    again, written = compress(found["dense"].half(), format).state()
    assert again == header and written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_bytes_of_before_load_and_are_still_written(dtype):
    found, name = files(), str(DTYPES[dtype]).removeprefix("torch.")
    data, dense = found["packed"][name], found["dense"].to(DTYPES[dtype])
    assert same_bits(unpacked(data).to_dense(), dense)
    assert torch.equal(packed(compress(dense, "bitmap")), data)


def test_a_state_of_version_1_loads():
    found = files()
    header, tensors = found["version 1"]
    assert header["version"] == 1 and tensors["rows"].dtype == torch.int16
    w = SparseMatrix.from_state(header, tensors)
    assert same_bits(w.to_dense(), found["dense"].half())
