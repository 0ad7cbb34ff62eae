"""Where tensors meet kernels: arguments, devices, launches, and what families share of them.

In reading order: of arguments ``dtypes``, ``tensors``, ``shapes``, ``numbers``, ``precision``,
``expressions`` and ``arguments``; of launches ``devices``, ``driver``, ``nvtx``, ``tensor_map``,
``plan`` and ``sequence``; of calls ``operation``, ``products``, ``operators`` and ``autograd``; and
``ahead``, ``candidates`` and ``trials``, which only preparing, compiling and tuning need.
"""
