"""Where tensors meet kernels: arguments, devices, launches, and what families share of them.

In reading order: of arguments ``dtypes``, ``tensors``, ``shapes``, ``numbers``, ``precision``,
``expressions`` and ``arguments``; of launches ``rehearsal``, ``devices``, ``driver``,
``tensor_map``, ``tuned``, ``plan`` and ``sequence``; of calls ``operation``, ``products``,
``operators``, ``early`` and ``autograd``; and ``ahead``, which preparing, compiling and tuning
need.
"""
