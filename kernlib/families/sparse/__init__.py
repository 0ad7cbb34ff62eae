"""Products with unstructured sparse matrices.

In reading order: ``descriptor``; ``matrix``, with ``layout`` and ``formats``, and with ``tensors``,
``csr``, ``fitted`` and ``packed``, which look after its tensors; ``lowering``, ``reference``,
``plans``, ``operation``, ``operators`` and ``rules``. ``prune`` makes zeros in weights.
"""
