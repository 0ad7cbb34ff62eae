"""From a product's sizes and strides to its launches, without torch.

In reading order: ``problem``, ``grouping`` and ``runs``; the kernels for any sizes, ``variant``,
``modes``, ``halves`` and ``slabs``; those of wgmma, ``largest``, ``hopper_variant`` and ``hopper``;
``estimates``, ``by_torch`` and ``choose``, which chooses between all these; and, of gradients by
factors, ``gradient_variant``, ``parts`` and ``gradients``.
"""
