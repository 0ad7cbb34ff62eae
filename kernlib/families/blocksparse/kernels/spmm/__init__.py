"""Kernels of products of a block-sparse and a dense matrix, one class each."""
