"""Products with Kronecker-sparse factors, in a training step too, and what they cost the host.

In reading order ``problems``, ``rivals``, ``training``, ``host``, ``summary``, and ``run``, which
has the list of cases.
"""
