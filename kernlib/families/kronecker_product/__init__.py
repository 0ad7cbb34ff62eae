"""Products with the Kronecker product of several matrices.

In reading order ``descriptor``, ``checks``, ``lowering``, ``reference``, ``plans``, ``product``,
``backward``, ``gradients``, ``operation``, ``matmul``, ``operators`` and ``ahead``.
"""
