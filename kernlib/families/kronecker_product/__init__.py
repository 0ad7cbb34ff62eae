"""Products with the Kronecker product of several matrices.

In reading order ``descriptor``, ``checks``, ``reference``, ``product``, ``operation``,
``operators`` and ``ahead``.
"""
