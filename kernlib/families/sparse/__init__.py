"""Products with unstructured sparse matrices.

In reading order ``descriptor``, ``matrix`` with its ``layout`` and ``formats``, ``checks``,
``lowering``, ``reference``, ``plans``, ``product``, ``gradients``, ``operation``, ``operators`` and
``ahead``.
"""
