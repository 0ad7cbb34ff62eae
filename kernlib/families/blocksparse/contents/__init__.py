"""The contents of layouts: their six tensors, made of masks or indices and read again.

In reading order ``sizes``, ``given`` (what callers hand over), ``host`` (what it knows), ``bits``
(by torch), ``device`` (by kernels), ``writing``, which chooses between the two, and ``matrices``.
"""
