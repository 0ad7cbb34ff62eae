"""The kernels of Kronecker products: a class each. Planners above them decide which factors each
applies (:mod:`kernlib.families.kronecker_product.lowering.choose`)."""
