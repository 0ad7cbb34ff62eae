"""Distance and kernel matrices of points, their gradients and reductions.

In reading order, each of what stands before it: ``descriptor`` and its ``stages``, ``lowering``,
``checks``, ``request``, ``reference`` and ``cpu``, ``matrix``, ``gradients``, ``categories``,
``reductions``, ``per_point`` and ``feature_map``, ``functions``, ``operation``, ``operators``.
"""
