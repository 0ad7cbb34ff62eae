"""Formulas of pairs: sums over features of two sets of points, and scores made of them, reduced
over one of the sets without storing a value a pair."""
