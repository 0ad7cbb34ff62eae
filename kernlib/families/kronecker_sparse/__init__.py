"""Products with Kronecker-sparse factors.

In reading order ``descriptor``, ``checks``, ``lowering``, ``reference``, ``gradients``, ``plans``
and ``operation``.
"""
