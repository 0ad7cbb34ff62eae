"""Launches and variants of one kernel of block-sparse products, as if it were the only one."""

from __future__ import annotations

from kernlib.families.blocksparse.lowering import choose
from kernlib.families.blocksparse.lowering.problem import Scope, Sdd, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered

HALVES = ("float16", "bfloat16")


def kernel_of(name: str, role: str = "spmm") -> Kernel:
    return next(kernel for kernel in choose.kernels(role) if kernel.name == name)


def lower(
    kernel: Kernel,
    epilogue: tuple,
    problem: Spmm | Sdd,
    arch: str,
    count: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launches of a problem that the kernel takes, by its own choice if none is told."""
    assert kernel.takes(problem, arch)
    gpu = Gpu(arch, count)
    return kernel.launch(epilogue, problem, gpu, choice or kernel.default(problem, gpu))


def variants(
    kernel: Kernel, epilogue: tuple, block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    return kernel.specs(epilogue, Scope(block, dtypes, arch=arch), arch)
