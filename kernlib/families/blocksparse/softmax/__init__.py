"""Softmax over the stored blocks of each row of a block-sparse matrix.

In reading order ``descriptor``, ``arguments``, ``reference``, ``plans``, ``primitive``,
``gradients``, ``operation``, ``operators``, ``functions`` and ``ahead``; its kernels are lowered by
:mod:`kernlib.families.blocksparse.lowering.softmax`.
"""
