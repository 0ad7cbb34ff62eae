"""Whole steps of programs, eager, compiled and captured, and calls that take the host's time.

In reading order ``problems``, ``steps``, ``mlps``, ``gaussian_process``, and ``run``, which has
the list of cases.
"""
