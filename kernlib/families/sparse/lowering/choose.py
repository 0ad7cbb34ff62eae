"""From a product with a compressed matrix to kernels, grids and parameters.

Pure arithmetic on plain data: no tensor and no device. The format of the matrix says in which
package of ``kernels`` those of its products are, of role "product".
"""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.lowering.codes import SLICES
from kernlib.families.sparse.lowering.problem import Problem, Scope
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.steps import Lowered

PACKAGE = "kernlib.families.sparse.kernels"
# Of each format with kernels, the package of its products; and in ``codecs`` the module of what
# makes and undoes it. A dense matrix is cuBLAS's. A call imports those of its format alone.
PRODUCTS = {
    **dict.fromkeys(("bitmap", *QUANTISED), "bitmap"),
    "macko": "macko",
    **dict.fromkeys(SLICES, "slices"),
}
CODECS = {**PRODUCTS, **dict.fromkeys(QUANTISED, "quantised")}


def formats() -> tuple[str, ...]:
    """Those with kernels."""
    return tuple(PRODUCTS)


def kernels(format: str) -> tuple[Kernel, ...]:
    """The kernels of a format, by rank; none of the dense one."""
    return kernel.kernels(f"{PACKAGE}.{PRODUCTS[format]}", "product") if format in PRODUCTS else ()


def codecs(format: str) -> tuple[Kernel, ...]:
    """The kernels that make and undo a format; none of the dense one."""
    return kernel.kernels(f"{PACKAGE}.codecs.{CODECS[format]}", "codec") if format in CODECS else ()


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
