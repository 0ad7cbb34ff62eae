"""Block-sparse attention from plain data to kernels.

``problem`` has the records, ``score_source`` the text that says what becomes of a logit and the
parameters that all kernels have, ``choose`` which kernel takes a problem. Each other module is a
kernel: its device code is in the folder of ``kernel_sources/blocksparse/attention/`` of its name.
"""
