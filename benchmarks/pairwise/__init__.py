"""Matrices of distances and kernels, their gradients, and products with them.

In reading order ``problems``, ``gradient``, ``matmul``, and ``run``, which has the list of cases.
"""
