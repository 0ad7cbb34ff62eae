"""Kernels of products with a factor, of any pattern."""
