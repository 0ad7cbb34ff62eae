"""Kernels on the host: the text that NVRTC would compile, compiled by g++ instead, with a thread of
the host for each of a block's.

``host.h`` has what CUDA C++ has beside C++, ``launch.h`` a launch, and the folders what takes the
place of those files of ``kernel_sources/`` that hold PTX. Barriers are real ones, tensor
cores multiply what their lanes hold, shared memory is full of NaN when a block begins, and a vector
that is not aligned ends the process. Blocks run one after the other.
"""
