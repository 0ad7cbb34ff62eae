"""The kernels of Kronecker-sparse operations: a class each, which
:func:`kernlib.lowering.kernel.choose` picks from."""
