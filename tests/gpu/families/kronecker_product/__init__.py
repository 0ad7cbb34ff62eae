"""Kronecker products on a GPU."""
