"""What kernlib asks of the CUDA driver itself, imported when the first kernel needs it, and NVTX
ranges around what it loads and launches, for Nsight Systems, where the setting ``KERNLIB_NVTX``
asks for them. Without that setting a launch costs nothing more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from kernlib import settings
from kernlib.jit import toolchain

OVERLAPS_FROM = 12030  # the oldest driver that captures overlapping launches in a CUDA graph


def bind_context(device: int) -> None:
    """Give a thread a CUDA context, if it has none. A launch by the driver fails without one, and
    torch binds one only when it calls the runtime, as by an allocation. The device must be current,
    since torch would take it for the current one from now on."""
    driver = toolchain.cuda_driver()
    if int(driver.cuCtxGetCurrent()[1]) == 0:
        handle = driver.cuDeviceGet(device)[1]
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(handle)[1])


def launch_config(shape: tuple[int, ...], stream: int, overlaps: bool) -> object:
    """The CUlaunchConfig of a launch on a stream. ``shape`` is the grid (3 numbers), the block (3)
    and the bytes of dynamic shared memory. The config owns the memory of its attributes: what is
    assigned to them is copied."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = shape[3:6]
    config.sharedMemBytes = shape[6]
    config.hStream = driver.CUstream(stream)
    if overlaps and version() >= OVERLAPS_FROM:
        kinds = driver.CUlaunchAttributeID
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


@lru_cache(maxsize=1)
def version() -> int:
    """The newest CUDA version that the driver supports: 12030 for 12.3."""
    from cuda.bindings import driver

    return int(driver.cuDriverGetVersion()[1])


@lru_cache(maxsize=1)
def launch_kernel_ex() -> Callable:
    """The driver's cuLaunchKernelEx."""
    from cuda.bindings.driver import cuLaunchKernelEx

    return cuLaunchKernelEx


@lru_cache(maxsize=1)
def function_type() -> type:
    """The class CUfunction. An int in place of an object of it would cost each launch 0.1 us."""
    from cuda.bindings.driver import CUfunction

    return CUfunction


@lru_cache(maxsize=1)
def encode_tiled() -> Callable:
    """cuTensorMapEncodeTiled by ctypes: 1 us, where cuda.bindings takes 10."""
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


# Ranges of NVTX.


def range_of(name: str) -> AbstractContextManager:
    """A range of this name, or nothing where none are asked for."""
    return torch.cuda.nvtx.range(name) if settings.current().nvtx else nullcontext()


def ranged(launch: Callable, name: str) -> Callable:
    """``launch`` within a range of this name, or ``launch`` itself where no ranges are asked
    for."""
    if not settings.current().nvtx:
        return launch
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def within():
        push(name)
        try:
            return launch()
        finally:
            pop()

    return within
