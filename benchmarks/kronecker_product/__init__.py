"""Products with Kronecker products, on both sides, and their gradients.

In reading order ``problems``, ``rivals`` and ``run``, which has the list of cases.
"""
