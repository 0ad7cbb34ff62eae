"""Block-sparse attention from plain data to kernels.

``problem`` has the records, ``score_source`` the text that says what becomes of a logit and the
parameters that all kernels have, ``choose`` which kernel takes a problem. The kernels are classes
of :mod:`kernlib.families.blocksparse.kernels.attention`.
"""
