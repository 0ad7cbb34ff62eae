"""Kernels of two factors."""
