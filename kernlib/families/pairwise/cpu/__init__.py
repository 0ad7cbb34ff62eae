"""The pairwise op on CPU tensors: plans, and the sums they take."""
