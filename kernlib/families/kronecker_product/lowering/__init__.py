"""From a product's sizes and strides to its launches, without torch.

In reading order ``problem``, ``grouping``, ``modes`` and ``choose``.
"""
