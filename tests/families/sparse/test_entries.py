"""Matrices compressed by their entries, without a dense matrix between."""

import subprocess
import sys

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernlib import sparse
from kernlib.families.sparse import matrix
from kernlib.families.sparse.matrix import compressed, rounded
from kernlib.sparse import compress
from tests.families.sparse.cases import FORMATS, random
from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def hostile(rows, cols, density, dtype):
    """A matrix with entries of all sorts, and which of them CSR stores: some of the zeros too."""
    dense = random(rows, cols, density, dtype)
    stored = (dense != 0) | (torch.rand(rows, cols) < 0.05)
    dense[stored & (dense == 0)] = -0.0
    dense[rows // 2, :2] = torch.tensor([float("nan"), -float("inf")])
    stored[rows // 2, :2] = True
    return dense, stored


def csr_of(dense, stored, kind=torch.int64):
    """The tensors of CSR, with the columns of each row in any order."""
    rows, cols = stored.nonzero(as_tuple=True)
    order = torch.randperm(rows.numel())
    order = order[rows[order].argsort(stable=True)]
    crow = torch.nn.functional.pad(stored.sum(1).cumsum(0), (1, 0))
    return crow.to(kind), cols[order].to(kind), dense[rows, cols][order]


def assert_same(w, other):
    """The same matrix, byte for byte."""
    assert (w.layout, w.nnz) == (other.layout, other.nnz)
    for name, tensor in w.tensors.items():
        bits = (t.contiguous().view(torch.uint8) for t in (tensor, other.tensors[name]))
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(*bits), name


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["auto", *FORMATS])
def test_csr_gives_the_bytes_of_the_dense_matrix(format, dtype, seed):
    for shape, density in (((9, 30), 0.3), ((70, 2100), 0.05), ((33, 600), 0.002), ((17, 40), 1)):
        dense, stored = hostile(*shape, density, dtype)
        kind = torch.int32 if density < 0.1 else torch.int64
        w = sparse.from_csr(*csr_of(dense, stored, kind), shape, format)
        assert_same(w, compressed(dense, format))


@pytest.mark.parametrize("format", FORMATS)
def test_torchs_sparse_layouts_give_the_bytes_of_the_dense_matrix(format, seed):
    dense = random(48, 320, 0.1)
    indices = dense.nonzero().flip(0)
    twice = torch.cat((indices, indices[:1])).T, dense[tuple(indices.T)]
    halves = torch.cat((twice[1], twice[1][:1] / 2))
    halves[0] /= 2
    for given in (
        *(dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_coo()),
        *(dense.to_sparse_bsr((4, 16)), dense.to_sparse_bsc((16, 8)), dense.to_sparse_bsr((48, 1))),
        torch.sparse_coo_tensor(twice[0], halves, dense.shape),
    ):
        assert_same(compress(given, format), compress(dense, format))


@pytest.mark.few(3)
@pytest.mark.parametrize("format", FORMATS)
def test_fewer_entries_than_panels_give_the_bytes_of_the_dense_matrix(format, seed):
    for rows in (0, 3, 33, 70):
        dense = torch.zeros(rows, 70035)
        places = [(0, 0), (0, 65000), (2, 65001), (2, 65009), (rows - 1, 70034)][: 5 if rows else 0]
        for number, place in enumerate(places):
            dense[place] = number + 1.0
        stored = dense != 0
        stored[:1, 40000] = True  # a zero in a panel without others
        w = sparse.from_csr(*csr_of(dense, stored), tuple(dense.shape), format)
        assert_same(w, compressed(dense, format))
    for width in (3, 5, 7):  # no panel is a number of such blocks
        assert_same(compress(dense.to_sparse_bsr((1, width)), format), w)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for t in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.numel() * t.element_size())
        return results


@pytest.mark.parametrize("format", ["u8", "u2"])
def test_columns_without_entries_cost_what_they_take_in_the_result(format):
    columns = 1 << 24
    given = torch.tensor([0, 2, 3]), torch.tensor([5, columns - 1, 7]), torch.ones(3)
    with Largest() as largest:
        w = sparse.from_csr(*given, (2, columns), format)
    assert largest.bytes <= w.nbytes + 32  # one tensor holds all, each from whole 16 bytes on


@pytest.mark.parametrize("format", ["u8", "u4", "u2"])
def test_a_wide_matrix_without_entries(format):
    empty = torch.zeros(31, 3047, dtype=torch.bfloat16)
    w = sparse.compress(empty.to_sparse_csr(), format)
    assert w.facts == sparse.compress(empty, format).facts and w.nnz == 0
    assert torch.equal(w.to_dense(), empty)


MEMORY = """
import pickle, resource, sys, torch
from kernlib import sparse
from kernlib.families.sparse.formats import bitmap, macko, slices
size, format = int(sys.argv[1]), sys.argv[2]
at = torch.arange(size)
col = torch.stack(((at - 1) % size, at, (at + 1) % size), 1).view(-1)
crow, values = torch.arange(size + 1) * 3, torch.ones(3 * size, dtype=torch.float16)
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = most()
w = sparse.from_csr(crow, col, values, (size, size), format)
assert w.nnz == 3 * size
x = torch.ones(2, size, dtype=torch.float16, requires_grad=True)
y = sparse.matmul(w, x)
y.sum().backward()
assert torch.equal(y, torch.full_like(y, 3)) and torch.equal(x.grad, torch.full_like(y, 3))
back = pickle.loads(pickle.dumps(w.transpose().convert("u4")))
assert back.nnz == 3 * size and back.density == 3 / size
assert most() - before < w.nbytes + (350 << 20), (most() - before, w.nbytes)
assert w.nbytes < (100 << 20)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("format", ["auto", "macko"])
def test_a_large_matrix_is_nowhere_laid_out_densely(format):
    """A cyclic tridiagonal one, of 800 MB where it is, from CSR to gradients."""
    command = [sys.executable, "-c", MEMORY, "20000", format]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_by_entries_a_matrix_becomes_what_it_does_by_the_dense_matrix(
    format, dtype, seed, monkeypatch
):
    w = compress(random(70, 700, 0.05, dtype), format)
    other = torch.float16 if dtype == torch.float32 else torch.float32

    def became():
        fresh = matrix.SparseMatrix(w.format, w.shape, w.dtype, w.tensors, w.facts)
        turned = fresh.transpose()
        return fresh, turned, fresh.convert("auto"), turned.convert("u4"), rounded(fresh, other)

    dense = became()
    monkeypatch.setattr(matrix, "LAID_OUT_BYTES", -1)
    for one, right in zip(became(), dense, strict=True):
        assert_same(one, right)


NO_MATRIX = {
    r"got shape \(2, 4, 4\): compress its matrices one by": torch.eye(4).expand(2, 4, 4),
    r"dense.values\(\) must have a dtype of float16": torch.eye(4, dtype=torch.float64),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc", "coo"])
def test_sparse_tensors_that_are_no_matrix_are_refused_by_name(layout):
    size = ((2, 2),) if layout.startswith("bs") else ()
    for message, dense in NO_MATRIX.items():
        given = getattr(dense, f"to_sparse_{layout}")(*size)
        with pytest.raises(ValueError, match=message):
            compress(given)


def test_indices_that_torch_has_not_looked_at_are_refused_by_name():
    values, two = torch.ones(2), torch.tensor([0, 1, 2])
    for make, name in ((torch.sparse_csr_tensor, "col"), (torch.sparse_csc_tensor, "row")):
        given = make(two, torch.tensor([0, 9]), values, (2, 2), check_invariants=False)
        with pytest.raises(ValueError, match=rf"dense.{name}_indices\(\) must hold"):
            compress(given)
    given = torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [0, -3]]), values, (2, 2), check_invariants=False
    )
    with pytest.raises(ValueError, match=r"dense.indices\(\) must hold indices from 0 to 1"):
        compress(given)


CSR = {
    "values must be a dense tensor": {"values": torch.eye(3).to_sparse()},
    r"shape must be two ints \(rows, columns\), got None": {"shape": None},
    "shape must be .* of at least 0": {"shape": (2, -4)},
    r"crow must have shape \(3,\), got \(2,\)": {"crow": torch.tensor([0, 3])},
    r"col must have shape \(3,\), got \(2,\)": {"col": torch.tensor([0, 3])},
    "col is on meta and values on cpu": {"col": torch.zeros(3, dtype=torch.int64, device="meta")},
    "crow must rise from 0 to 3, .* got 1 to 3": {"crow": torch.tensor([1, 2, 3])},
    "crow must rise from 0 to 3, .* got 0 to 2": {"crow": torch.tensor([0, 2, 2])},
    "got 0 to 3, falling in between": {"crow": torch.tensor([0, 4, 3])},
    "falling": {"crow": torch.tensor([0, 2**31 - 1, 3], dtype=torch.int32)},
    "col must hold columns from 0 to 3; 1 are others": {"col": torch.tensor([0, 4, 1])},
    "from 0 to 3; 2 are others": {"col": torch.tensor([0, 2**62, -1])},
    "col must hold each column once in a row, 1 stand": {"col": torch.tensor([2, 2, 1])},
}


@pytest.mark.parametrize("message", CSR)
def test_what_is_no_csr_is_refused(message):
    given = {
        "crow": torch.tensor([0, 2, 3]), "col": torch.tensor([0, 3, 1]), "values": torch.ones(3),
        "shape": (2, 4),
    }  # fmt: skip
    assert sparse.from_csr(**given, format="bitmap").nnz == 3
    assert sparse.from_csr(**given | {"shape": [numpy.int64(2), 4]}).shape == (2, 4)
    with pytest.raises((TypeError, ValueError), match=message):
        sparse.from_csr(**given | CSR[message], format="bitmap")


def test_csr_without_entries_or_rows():
    none = torch.zeros(0, dtype=torch.int64)
    for shape in ((0, 0), (0, 4), (3, 0), (3, 4)):
        crow = torch.zeros(shape[0] + 1, dtype=torch.int64)
        assert sparse.from_csr(crow, none, torch.ones(0), shape).to_dense().shape == shape
