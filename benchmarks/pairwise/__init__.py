"""Matrices of distances and kernels, their gradients, and products with them.

In reading order ``problems``, ``gradient``, ``matmul``, ``matmul_gradient``, and ``run``, which has
the list of cases.
"""
