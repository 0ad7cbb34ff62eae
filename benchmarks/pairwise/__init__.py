"""Matrices of distances and kernels, their gradients, and products with them.

In reading order ``problems``, ``gradient``, ``matmul``, ``matmul_gradient``, ``by_hand`` and
``keops`` with rivals of the latter two, and ``run``, which has the list of cases.
"""
