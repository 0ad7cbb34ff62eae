"""Distance and kernel matrices of points, their gradients and reductions.

In reading order ``descriptor`` and its ``stages``, ``checks`` and ``request``, ``lowering``,
``reference``, ``plans``, ``matrix``, ``gradients``, ``operation``, ``operators``, ``ahead``,
``reductions``, ``functions``.
"""
