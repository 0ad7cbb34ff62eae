"""Kernels of gradients of a weight, whose depth is the batch: none takes a short one."""
