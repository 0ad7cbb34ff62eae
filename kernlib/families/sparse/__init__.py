"""Products with unstructured sparse matrices.

In reading order ``descriptor``, ``matrix`` and its ``formats``, ``checks``, ``lowering``,
``reference``, ``gradients``, ``plans`` and ``operation``.
"""
