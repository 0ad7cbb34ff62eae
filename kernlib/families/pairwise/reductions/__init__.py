"""Reductions of matrices that are not stored: ``arguments``, the ways to compute them,
``operation``."""
