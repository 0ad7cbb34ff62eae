"""Matrices of mixed points: tables of categorical features add to sums of numerical ones."""
