"""Which chains have plans of their own, forward and backward: two factors in half precision, batch
first, with epilogues behind the last alone."""

from __future__ import annotations

import torch

from kernlib.families.kronecker_sparse.descriptor import KroneckerSparseChain

HALVES = torch.float16, torch.bfloat16


def is_of_kind(chain: KroneckerSparseChain) -> bool:
    """Whether it is such a chain, of any dtype."""
    return len(chain.factors) == 2 and not chain.factors[0].epilogue and not chain.batch_last
