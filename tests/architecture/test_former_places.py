"""Pickles of version 0.1 before its families were packages name modules that have moved since."""

import pickle

import pytest
import torch

import kernlib as kl
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.sparse import compress

# Where something is, and where it was.
MOVED = {
    b"kernlib.families.pairwise.descriptor": b"kernlib.descriptors.pairwise",
    b"kernlib.families.pairwise.stages": b"kernlib.descriptors.norms",
    b"kernlib.families.kronecker_sparse.descriptor": b"kernlib.descriptors.kronecker_sparse",
    b"kernlib.families.sparse.descriptor": b"kernlib.descriptors.sparse",
    b"kernlib.families.sparse.matrix": b"kernlib.ops.sparse_matrix",
}
FACTOR = kl.KroneckerSparse(1, 2, 3, 4)
DESCRIPTORS = {
    "pairwise": kl.gaussian(symmetric=True),
    "stages": kl.Pairwise(inner=kl.Power(), outer=kl.Root()),
    "every stage": (kl.Abs(), kl.ExpPower(), kl.Identity(), kl.PowerLog(), kl.Sqrt(), kl.Square()),
    "factor": FACTOR,
    "chain": kl.KroneckerSparseChain((FACTOR, kl.KroneckerSparse(1, 5, 2, 4))),
    "sparse": SparseMatmul((kl.Bias(), kl.Relu())),
}


def as_before(value) -> bytes:
    """A pickle, in the protocol that writes names out, with the former ones."""
    written = pickle.dumps(value, 0)
    for now, before in MOVED.items():
        written = written.replace(now, before)
    assert b"kernlib.families" not in written
    return written


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptors_are_found(name):
    assert pickle.loads(as_before(DESCRIPTORS[name])) == DESCRIPTORS[name]


def test_a_compressed_matrix_is_found():
    dense = torch.eye(20)
    assert torch.equal(pickle.loads(as_before(compress(dense, "u8"))).to_dense(), dense)
