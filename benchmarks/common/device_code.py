"""Small kernels of benchmarks: from source by NVRTC, and onto torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from kernlib.jit import toolchain
from kernlib.runtime import devices
from kernlib.runtime import driver as launching

ERROR_WIDTH = 240  # characters of an error in a cell


def compiled(source: str, arch: str = "sm_90a", target: str = "cubin") -> bytes:
    """Code of a kind that cuda.core compiles to: "cubin", "ptx" or "ltoir"."""
    core = toolchain.cuda_core()
    extra = {"link_time_optimization": True} if target == "ltoir" else {}
    options = core.ProgramOptions(arch=arch, std="c++17", **extra)
    return bytes(core.Program(source, "c++", options).compile(target).code)


def cell(call: Callable[[], object]) -> object:
    """The result of a call, or its error as text, so that one failure costs one cell."""
    try:
        return call()
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {text}"[:ERROR_WIDTH]


class Kernels:
    """The kernels of one source on the current device."""

    def __init__(self, source: str) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        launching.bind_context(torch.cuda.current_device())
        self.driver = toolchain.cuda_driver()
        self.library = self._check(
            self.driver.cuLibraryLoadData(compiled(source), [], [], 0, [], [], 0)
        )
        self._functions: dict[str, object] = {}

    def function(self, name: str) -> object:
        """The CUfunction of a kernel."""
        if name not in self._functions:
            kernel = self._check(self.driver.cuLibraryGetKernel(self.library, name.encode()))
            self._functions[name] = self._check(self.driver.cuKernelGetFunction(kernel))
        return self._functions[name]

    def prepare(
        self, name: str, *arguments: object, grid: int = 1, block: int = 32, overlaps: bool = False
    ) -> Callable[[], None]:
        """A launch on the stream that is current when it is called. Tensors are passed as their
        pointers, integers as 64 bits."""
        function = self.function(name)
        values = tuple(a.data_ptr() if torch.is_tensor(a) else a for a in arguments)
        kinds = tuple(
            ctypes.c_void_p if torch.is_tensor(a) else ctypes.c_longlong for a in arguments
        )
        launch = self.driver.cuLaunchKernelEx
        configs: dict[int, object] = {}

        def call() -> None:
            stream = devices.current_stream(torch.cuda.current_device())
            config = configs.get(stream)
            if config is None:
                shape = (grid, 1, 1, block, 1, 1, 0)
                config = configs[stream] = launching.launch_config(shape, stream, overlaps)
            self._check(launch(config, function, (values, kinds), 0))

        return call

    def __call__(self, name: str, *arguments: object, **shape: int) -> None:
        self.prepare(name, *arguments, **shape)()

    @staticmethod
    def _check(result: tuple) -> object:
        status, *values = result
        if int(status) != 0:
            raise RuntimeError(f"CUDA driver: {status.name}")
        return values[0] if values else None
