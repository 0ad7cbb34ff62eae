"""Measurements beside floors and rivals: ``python -m benchmarks.pairwise --json FILE``.

A package a family, ``programs`` and ``service`` for what concerns several, ``common`` for what the
benchmarks share. ``compare`` and ``report`` read what they have written to ``results``; see
CONTRIBUTING.md.
"""
