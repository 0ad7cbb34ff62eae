"""Kernels of block-sparse attention, one class each; those of its gradients are in ``gradient``,
which a first call without any need not load."""
