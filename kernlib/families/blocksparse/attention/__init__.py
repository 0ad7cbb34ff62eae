"""Attention over the stored blocks of a layout, by one kernel that stores no scores.

In reading order ``functions`` and ``as_torch``, ``descriptor``, ``operation``, ``arguments``,
``plans``, ``reference`` with ``pieces`` and ``dropout``, and ``operators``; its kernels are lowered
by :mod:`kernlib.families.blocksparse.lowering.attention`.
"""
