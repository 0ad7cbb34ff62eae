"""Products with unstructured sparse matrices.

In reading order ``problems``, ``rivals``, ``summary``, and ``run``, which has the list of cases;
``plot`` draws what was measured.
"""
