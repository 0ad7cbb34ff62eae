"""Products with the Kronecker product of several matrices.

In reading order ``descriptor``, ``lowering``, ``reference``, ``plans``, ``operation``, ``matmul``,
``operators`` and ``rules``.
"""
