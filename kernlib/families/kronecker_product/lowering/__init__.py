"""From a product's sizes and strides to its launches, without torch.

In reading order ``problem``, ``grouping``, ``runs``, ``variant``, ``modes``, ``slabs`` and
``choose``; then, of gradients by factors, ``gradient_variant``, ``parts`` and ``gradients``.
"""
