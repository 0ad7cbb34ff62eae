"""Reductions of matrices that are not stored: ``arguments``, who computes them, ``operation``."""
