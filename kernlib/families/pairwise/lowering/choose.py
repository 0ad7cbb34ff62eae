"""Which kernel computes a matrix: ``few``, which takes few pairs, ``split`` by products of tensor
cores, which takes p = 2 and dot products where that pays, and ``direct``, which takes everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.kernels.few import Few
from kernlib.families.pairwise.lowering.problem import Call, Problem, Scope
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered

ON_LANES: tuple[Kernel, ...] = (Few(), DIRECT)


@cache
def _products() -> tuple[Kernel, ...]:
    """Those of products, whose modules would cost the first call of any other descriptor 3 ms."""
    from kernlib.families.pairwise.kernels.split import Split

    return (Split(),)


def candidates(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem: each the name of a kernel, or the tile of the
    direct one. There is always one."""
    call = Call(descriptor, problem, (), precision)
    every = kernel.options(_kernels(descriptor), call, arch)
    return [option.knobs or option.choice for option in every]


def lower(
    descriptor: Pairwise,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    strides: tuple[int, ...],
    precision: str,
    choice: Mapping[str, object] | None = None,
) -> Lowered:
    """The launches of a call: by ``choice`` if it is one of the candidates (values may be text),
    else by rule. Raises UnsupportedError for sizes that no grid can hold."""
    gpu, call = Gpu(arch, multiprocessors), Call(descriptor, problem, strides, precision)
    if choice and "tile" in choice:
        choice = {"kind": DIRECT.name, **choice}
    option = kernel.choose(_kernels(descriptor), call, gpu, choice)
    return option.kernel.launch(descriptor, call, gpu, option.knobs)


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for inputs of ``dtypes``."""
    return kernel.specs(_kernels(descriptor), descriptor, Scope(dtypes, arch), arch)


def _kernels(descriptor: Pairwise) -> tuple[Kernel, ...]:
    return (*_products(), *ON_LANES) if descriptor.takes_products else ON_LANES
