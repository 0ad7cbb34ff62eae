"""The pairwise op on CPU tensors: plans, the sums they take, and squared distances by products."""
