"""Products with unstructured sparse matrices.

In reading order: ``descriptor``; ``matrix``, with ``layout`` and ``formats``, and with ``tensors``,
``moved``, ``state``, ``csr`` and ``fitted``, which look after its tensors; ``checks``,
``lowering``, ``kept``, ``reference``, ``plans``, ``product``, ``gradients``, ``operation``,
``operators`` and ``ahead``. ``prune`` makes zeros in weights.
"""
