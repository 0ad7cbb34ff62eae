"""Products, softmax and attention of block-sparse matrices.

In reading order ``layout`` with ``contents`` and ``builders``, ``descriptor``, ``checks``,
``lowering``, ``reference``, ``plans``, ``product``, ``gradients``, ``operation``, ``functions``,
``operators`` and ``ahead``; then the same of ``softmax`` and
``attention``.
"""
