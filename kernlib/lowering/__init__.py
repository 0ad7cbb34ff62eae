"""Plain data behind kernels: launches and their buffers, text of epilogues, tensor maps, wgmma.

In reading order ``arithmetic``, ``dtypes``, ``steps``, ``parameters``, ``choice``, ``names``,
``epilogue_source``, ``product_source``, ``tma`` and ``wgmma``. Nothing here imports torch.
"""
