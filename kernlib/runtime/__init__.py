"""Where tensors meet kernels: arguments, devices, launches, and what families share of them.

In reading order ``tensors``, ``numbers``, ``precision``, ``arguments``, ``launch``, ``sequence``,
``tensor_map``, ``autograd``, ``candidates``, ``expressions``.
"""
