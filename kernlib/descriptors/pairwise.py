"""Where pickles of kernlib 0.1 look for what is in ``kernlib.families.pairwise.descriptor``."""

from kernlib.families.pairwise.descriptor import Pairwise

__all__ = ["Pairwise"]
