"""From a product's sizes and strides to its launches, without torch.

In reading order: ``problem``, ``grouping`` and ``runs``; ``parameters``, which all kernels share;
``slabs`` and ``passes``, which cut a product for the kernels of several groups; ``estimates`` and
``by_torch``, for kernels of any sizes; ``choose``, which chooses between kernels; and
``gradients``, those by factors.
"""
