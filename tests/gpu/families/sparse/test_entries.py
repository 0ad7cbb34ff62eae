"""Matrices compressed on a GPU by their entries, where a dense matrix would be too large."""

from __future__ import annotations

import pytest
import torch

from kernlib import sparse
from kernlib.families.sparse import matrix
from kernlib.sparse import compress
from tests.families.sparse.cases import FORMATS, random


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format", [*FORMATS, "auto"])
def test_entries_give_the_bytes_that_kernels_give(format, dtype, seed, monkeypatch):
    dense = random(70, 2100, 0.05, dtype, "cuda")
    csr = dense.to_sparse_csr()
    w = compress(dense, format)
    turned, other = w.transpose(), w.convert("u4")
    monkeypatch.setattr(matrix, "LAID_OUT_BYTES", -1)
    found = compress(csr, format)
    pairs = (found, w), (found.transpose(), turned), (found.convert("u4"), other)
    for one, right in pairs:
        assert (one.layout, one.nnz) == (right.layout, right.nnz)
        for name, tensor in one.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), right.tensors[name].view(torch.uint8))


def test_a_matrix_of_200000_rows_is_multiplied(seed):
    """Tridiagonal and cyclic: 80 GB as a dense matrix."""
    size = 200_000
    at = torch.arange(size, device="cuda")
    col = torch.stack(((at - 1) % size, at, (at + 1) % size), 1).view(-1)
    crow = torch.arange(size + 1, device="cuda") * 3
    values = torch.rand(3 * size, device="cuda").half()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    w = sparse.from_csr(crow, col, values, (size, size), "u8")
    assert torch.cuda.max_memory_allocated() - before < w.nbytes + (1 << 30)
    x = torch.rand(size, device="cuda").half().requires_grad_()
    y = sparse.matmul(w, x)
    y.sum().backward()
    terms = values.double().view(size, 3)
    right = (terms * x.detach().double()[col.view(size, 3)]).sum(1)
    slope = torch.zeros_like(right).index_add_(0, col, values.double())
    assert ((y - right).abs() <= 2e-3 * right.abs() + 1e-3).all()
    assert ((x.grad - slope).abs() <= 2e-3 * slope.abs() + 1e-3).all()
