"""Products with Kronecker-sparse factors.

In reading order ``descriptor``, ``checks``, ``lowering``, ``reference``, ``plans``, ``product``,
``gradients``, ``operation``, ``operators`` and ``ahead``.
"""
