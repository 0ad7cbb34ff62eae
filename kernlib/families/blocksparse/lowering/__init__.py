"""Kernels of block-sparse matrices: from a problem of sizes and strides to launches."""
