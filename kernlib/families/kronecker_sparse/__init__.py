"""Products with Kronecker-sparse factors.

In reading order ``descriptor``, ``lowering``, ``reference``, ``plans``, ``operation``,
``operators`` and ``rules``.
"""
