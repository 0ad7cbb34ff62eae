"""Where pickles of kernlib 0.1 look for what is in
``kernlib.families.kronecker_sparse.descriptor``."""

from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain

__all__ = ["KroneckerSparse", "KroneckerSparseChain"]
