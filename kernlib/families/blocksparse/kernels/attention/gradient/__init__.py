"""Kernels of the gradients of block-sparse attention, one class each."""
