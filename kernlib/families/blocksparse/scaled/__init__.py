"""Products of float8 with block-sparse matrices, with a scale for each stored block and for each
column that is multiplied.

In reading order ``functions``, ``descriptor``, ``operation``, ``reference`` and ``operators``; the
kernel is lowered by
:mod:`kernlib.families.blocksparse.kernels.scaled`.
"""
