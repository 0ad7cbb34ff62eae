"""From a product with a compressed matrix to kernels, grids and parameters.

Pure arithmetic on plain data: no tensor and no device. The format of the matrix says which kernels
there are: those of role "product" that name it among their ``formats``.
"""

from __future__ import annotations

from functools import cache

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.lowering.problem import Problem, Scope
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.steps import Lowered

PACKAGE = "kernlib.families.sparse.kernels"
CODECS = f"{PACKAGE}.codecs"


def formats() -> tuple[str, ...]:
    """Those with kernels; a dense matrix is cuBLAS's."""
    every = (name for each in kernel.kernels(PACKAGE, "product") for name in each.formats)
    return tuple(dict.fromkeys(every))


@cache
def kernels(format: str) -> tuple[Kernel, ...]:
    """The kernels of a format, by rank; none of the dense one."""
    return tuple(each for each in kernel.kernels(PACKAGE, "product") if format in each.formats)


def codecs(format: str) -> tuple[Kernel, ...]:
    """The kernels that make and undo a format; none of the dense one."""
    return tuple(each for each in kernel.kernels(CODECS, "codec") if format in each.formats)


def codec_specs(format: str, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """The specs of :func:`codecs` for some dtypes."""
    return kernel.specs(codecs(format), (), Scope(format, dtypes, ""), "")


def takes(problem: Problem, arch: str) -> bool:
    """Whether a kernel computes a problem; else the matrix is decoded and multiplied by cuBLAS."""
    return any(each.takes(problem, arch) for each in kernels(problem.format))


def lower(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a problem. Raises UnsupportedError for one that no kernel takes."""
    gpu = Gpu(arch, multiprocessors)
    option = kernel.choose(kernels(problem.format), problem, gpu)
    if option is None:
        raise UnsupportedError(
            f"no {problem.format} kernel multiplies a {problem.rows} x {problem.cols} "
            f"{problem.dtype} matrix by {problem.columns} vectors"
        )
    return option.kernel.launch(epilogue, problem, gpu, option.knobs)


def variants(
    format: str, epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose; none for a format without kernels."""
    return kernel.specs(kernels(format), epilogue, Scope(format, dtypes, arch), arch)
