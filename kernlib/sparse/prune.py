"""Pruning of weights: by magnitude, by Wanda and by SparseGPT, for the linear layers of a model in
place, and N:M masks of tensors. What stays, :func:`kernlib.nn.sparsify` compresses."""

from kernlib.families.sparse.prune import n_m
from kernlib.nn.pruning.methods import magnitude, sparsegpt, wanda

__all__ = ["magnitude", "n_m", "sparsegpt", "wanda"]
