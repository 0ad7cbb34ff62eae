"""Kernels of block-sparse results of dense products, one class each, and what those on Hopper
share."""
