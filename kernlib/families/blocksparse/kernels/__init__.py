"""The kernels of block-sparse operations, a class each: in packages those of a role, which
:func:`kernlib.lowering.kernel.choose` picks from, as it loads all of a package."""
