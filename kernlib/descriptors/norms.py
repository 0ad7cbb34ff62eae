"""Where pickles of kernlib 0.1 look for what is in ``kernlib.families.pairwise.stages``."""

from kernlib.families.pairwise.stages import (
    Abs,
    ExpPower,
    Identity,
    Power,
    PowerLog,
    Root,
    Sqrt,
    Square,
)

__all__ = ["Abs", "ExpPower", "Identity", "Power", "PowerLog", "Root", "Sqrt", "Square"]
