"""One package a family of operations; none of them imports another.

Each reads in the order descriptor, arguments (``checks``), lowering, reference, gradients,
operation. What two of them need lies in ``kernlib.lowering`` or ``kernlib.runtime``.
"""
