"""Layers with block-sparse weights, and attention over the stored blocks of a layout.

``weight`` has what layers share, ``growth`` which blocks stay, go and come; then ``linear``,
``conv``, ``attention``, and ``replace`` for whole models.
"""
