"""Products, softmax and attention of block-sparse matrices.

In reading order ``layout`` with ``contents`` and ``builders``; then a call: ``functions``,
``descriptor``, ``operation``, ``checks``, ``plans``, ``lowering``, ``reference`` and ``operators``;
then the same of ``softmax``, ``attention`` and ``scaled``.
"""
