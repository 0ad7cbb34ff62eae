"""Where pickles of kernlib 0.1 look for what is in ``kernlib.families.sparse.matrix``."""

from kernlib.families.sparse.matrix import SparseMatrix, _unpickled

__all__ = ["SparseMatrix", "_unpickled"]
