"""Which kernel computes a block-sparse product.

Pure arithmetic on plain data: no tensor, no device, and nothing of what a layout holds. What the
generated code depends on is in the spec; sizes, strides and the epilogue's parameters are launch
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.decode import Decode
from kernlib.families.blocksparse.kernels.portable import PORTABLE
from kernlib.families.blocksparse.kernels.sampled import SAMPLED
from kernlib.families.blocksparse.lowering import (
    hopper,
    hopper_words,
    narrow,
    sampled_hopper,
    stationary,
    tiles,
)
from kernlib.families.blocksparse.lowering.problem import Sdd, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.choice import Choice
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.steps import Lowered


class Scope(NamedTuple):
    """What is known of products whose kernels are compiled ahead: rows and columns of a block,
    dtypes, and the precision of float32, None for both."""

    block: tuple[int, int]
    dtypes: tuple[str, ...]
    precision: str | None = None


class _Module(Kernel):
    """A kernel whose methods are functions of a module."""

    def __init__(self, module: ModuleType):
        self.module = module
        self.name = module.KIND

    def takes(self, problem: Any, arch: str) -> bool:
        return self.module.takes(problem, arch)

    def choices(self, problem: Any, arch: str) -> list[Choice]:
        has = hasattr(self.module, "candidates")
        return self.module.candidates(problem, arch) if has else [{}]

    def default(self, problem: Any, gpu: Gpu) -> Choice:
        every = self.choices(problem, gpu.arch)
        has = hasattr(self.module, "default")
        return self.module.default(problem, every, gpu.multiprocessors) if has else every[0]

    def pays(self, problem: Any, gpu: Gpu) -> bool:
        has = hasattr(self.module, "pays")
        return not has or self.module.pays(problem, gpu.multiprocessors)

    def launch(self, subject: Any, problem: Any, gpu: Gpu, choice: Mapping[str, Any]) -> Lowered:
        knobs = (dict(choice),) if hasattr(self.module, "candidates") else ()
        return self.module.lower(subject, problem, *gpu, *knobs)

    def specs(self, subject: Any, scope: Scope, arch: str) -> list[KernelSpec]:
        more = (scope.precision,) if getattr(self.module, "PRECISION", False) else ()
        return self.module.variants(subject, scope.block, scope.dtypes, arch, *more)


SPMM: tuple[Kernel, ...] = (
    Decode(),
    *map(_Module, (hopper, hopper_words, narrow)),
    PORTABLE,
)
SDD: tuple[Kernel, ...] = (*map(_Module, (stationary, tiles, sampled_hopper)), SAMPLED)


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
    return [option.choice for option in kernel.options(_kernels(problem), problem, arch)]


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
    scope, among = Scope(block, dtypes, precision), SDD if mode == "sdd" else SPMM
    every = (spec for each in among for spec in each.specs(epilogue, scope, arch))
    return list(dict.fromkeys(every))


def _kernels(problem: Spmm | Sdd) -> tuple[Kernel, ...]:
    return SDD if isinstance(problem, Sdd) else SPMM
