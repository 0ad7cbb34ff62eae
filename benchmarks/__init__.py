"""Measurements beside floors and rivals: ``python -m benchmarks.pairwise --json FILE``.

A package a family, ``service`` for what families share, ``common`` for what their benchmarks share.
``compare`` and ``report`` read what they have written to ``results``; see CONTRIBUTING.md.
"""
