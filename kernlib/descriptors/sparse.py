"""Where pickles of kernlib 0.1 look for what is in ``kernlib.families.sparse.descriptor``."""

from kernlib.families.sparse.descriptor import SparseMatmul

__all__ = ["SparseMatmul"]
