"""Kernels of products with several l, batch first: none takes d = 1."""
