"""What a caller sets as torch's default device or dtype, and autocast, decide of no temporary."""

import pytest
import torch

import kernlib as kl
from kernlib import sparse
from kernlib.compat import macko
from kernlib.sparse import SparseMatrix, compress
from tests.families.sparse.cases import FORMATS, random, same_bits
from tests.support.defaults import SURROUNDINGS

every_surrounding = pytest.mark.parametrize("where", SURROUNDINGS)


@every_surrounding
@pytest.mark.parametrize("format", [*FORMATS, "auto"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_matrix_follows_its_dense_one(where, format, dtype, seed):
    for shape in ((70, 300), (0, 5), (5, 0)):
        dense, x = random(*shape, 0.3, dtype), torch.ones(3, shape[1], dtype=dtype)
        plain = compress(dense, format)
        wanted = sparse.matmul(plain, x)
        with SURROUNDINGS[where]():
            w = compress(dense, format)
            assert same_bits(w.to_dense(), dense) and w.nnz == plain.nnz
            assert same_bits(w.convert("bitmap").to_dense(), dense)
            assert same_bits(w.transpose().to_dense(), dense.t())
            again = SparseMatrix.from_state(*w.state())
            found = kl.run_kernel(kl.SparseMatmul(), again, x)
        assert again.layout == plain.layout and again.device.type == "cpu"
        for name, tensor in plain.tensors.items():
            assert torch.equal(again.tensors[name], tensor)
        assert found.device.type == "cpu" and found.dtype == dtype and torch.equal(found, wanted)


@every_surrounding
def test_csr_and_pruning(where, seed):
    dense = random(9, 30)
    given = dense.to_sparse_csr()
    parts = given.crow_indices(), given.col_indices(), given.values()
    with SURROUNDINGS[where]():
        assert same_bits(sparse.from_csr(*parts, (9, 30)).to_dense(), dense)
        assert same_bits(compress(given).to_dense(), dense)
        kept = sparse.magnitude(dense, 0.2, per="row")
    assert same_bits(kept, sparse.magnitude(dense, 0.2, per="row"))


@every_surrounding
def test_macko_s_names(where, seed):
    dense, x = random(9, 30, 0.3, torch.float16), torch.ones(30, dtype=torch.float16)
    wanted = macko.multiply(macko.compress(dense), x)
    with SURROUNDINGS[where]():
        compressed = macko.compress(dense)
        assert same_bits(macko.decompress(compressed), dense)
        assert torch.equal(macko.multiply(compressed, x), wanted)
