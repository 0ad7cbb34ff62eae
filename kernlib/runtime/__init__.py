"""Where tensors meet kernels: arguments, devices, launches, and what families share of them.

In reading order: of arguments ``dtypes``, ``tensors``, ``shapes``, ``numbers``, ``precision``,
``expressions`` and ``arguments``; of launches ``rehearsal``, ``devices``, ``driver``, ``nvtx``,
``tensor_map``, ``tuned``, ``plan`` and ``sequence``; of calls ``operation``, ``products``,
``operators`` and ``autograd``; and ``ahead``, which only preparing, compiling and tuning need.
"""
