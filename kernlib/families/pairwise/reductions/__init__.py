"""Reductions of matrices that are not stored: ``arguments``, ``plans``, then who computes them."""
