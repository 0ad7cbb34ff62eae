"""The GPUs of this machine, as far as kernels are concerned."""

from __future__ import annotations

from typing import NamedTuple

ARCH_WITHOUT_GPU = "sm_90a"


class Gpu(NamedTuple):
    """A GPU that torch can use. Without ``arch`` kernels do not run there, and ``problem`` says
    why."""

    index: int
    name: str
    arch: str | None
    problem: str = ""


def gpus() -> list[Gpu]:
    """All that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Gpu:
    import torch

    from kernlib.errors import UnsupportedError
    from kernlib.runtime.devices import arch_of

    name = torch.cuda.get_device_name(index)
    try:
        return Gpu(index, name, arch_of(index))
    except UnsupportedError as error:
        return Gpu(index, name, None, str(error))


def archs() -> list[str]:
    """The targets of this machine's GPUs, each once."""
    return list(dict.fromkeys(gpu.arch for gpu in gpus() if gpu.arch is not None))
