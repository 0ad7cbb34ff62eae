"""Which kernel computes a block-sparse product.

Pure arithmetic on plain data: no tensor, no device, and nothing of what a layout holds. What the
generated code depends on is in the spec; sizes, strides and the epilogue's parameters are launch
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.lowering.problem import Scope, Sdd, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered


def kernels(role: str) -> tuple[Kernel, ...]:
    """Those of products, "spmm", or of sampled ones, "sdd", loaded at the first call for them."""
    return kernel.kernels(f"kernlib.families.blocksparse.kernels.{role}", role)


def takes(problem: Spmm | Sdd, arch: str) -> bool:
    """Whether some kernel computes a problem."""
    return any(each.takes(problem, arch) for each in _kernels(problem))


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Spmm | Sdd,
    arch: str,
    multiprocessors: int,
    choice: Mapping[str, object] | None = None,
) -> Lowered:
    """The launches of a problem: by ``choice`` if it is one of the problem's candidates (values may
    be text), else by rule. Raises UnsupportedError for sizes that no grid can hold."""
    gpu = Gpu(arch, multiprocessors)
    option = kernel.choose(_kernels(problem), problem, gpu, choice)
    return option.kernel.launch(epilogue, problem, gpu, option.knobs)


def candidates(problem: Spmm | Sdd, arch: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem, by preference: each the name of a kernel and its
    knobs."""
    return kernel.candidates(_kernels(problem), problem, arch)


def default(problem: Spmm | Sdd, multiprocessors: int, arch: str) -> Choice:
    """Of the candidates the one taken untuned."""
    return kernel.choose(_kernels(problem), problem, Gpu(arch, multiprocessors)).choice


def variants(
    epilogue: tuple[Epilogue, ...],
    mode: str,
    block: tuple[int, int],
    dtypes: tuple[str, ...],
    arch: str,
    precision: str | None = None,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for products of a mode, "sdd", "dsd" or "dds", with
    blocks of so many rows and columns, whatever their sizes, strides and alignment. ``precision``
    is float32's, None for both."""
    scope = Scope(block, dtypes, precision, arch)
    return kernel.specs(kernels("sdd" if mode == "sdd" else "spmm"), epilogue, scope, arch)


def _kernels(problem: Spmm | Sdd) -> tuple[Kernel, ...]:
    return kernels("sdd" if isinstance(problem, Sdd) else "spmm")
