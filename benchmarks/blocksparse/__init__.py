"""Products and softmax of block-sparse matrices, their gradients, and layouts made on the GPU.

In reading order ``problems``, ``rivals`` and ``run``, which has the list of cases.
"""
