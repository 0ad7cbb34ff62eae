"""Kernels of Kronecker products: what lowering makes of sizes, and what their text computes."""
