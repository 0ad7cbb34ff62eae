"""Attention over the stored blocks of a layout, by one kernel that stores no scores.

In reading order ``descriptor``, ``arguments``, ``dropout``, ``pieces``,
``reference``, ``plans``, ``primitive``, ``gradients``, ``operation``, ``operators``, ``functions``,
``as_torch`` and ``ahead``; its kernels are lowered by
:mod:`kernlib.families.blocksparse.lowering.attention`.
"""
