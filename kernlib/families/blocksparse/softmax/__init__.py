"""Softmax over the stored blocks of each row of a block-sparse matrix.

In reading order ``functions``, ``descriptor``, ``operation``, ``arguments``, ``plans``,
``reference`` and ``operators``; its kernels are lowered by
:mod:`kernlib.families.blocksparse.kernels.softmax`.
"""
