"""Plain data behind kernels: launches and their buffers, text of epilogues, tensor maps, wgmma.

In reading order ``steps``, ``epilogue_source``, ``product_source``, ``tma``, ``wgmma``. Nothing
here imports torch.
"""
