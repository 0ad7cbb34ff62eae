"""Which kernel computes a matrix: ``few``, which takes few pairs, ``split`` by products of tensor
cores, which takes p = 2 and dot products where that pays, and ``direct``, which takes everything.
A first call loads the modules of those alone that it may take.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering import problem as lowering
from kernlib.families.pairwise.lowering.problem import Call, Problem, Scope
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered


@cache
def _kernels(products: bool, few: bool) -> tuple[Kernel, ...]:
    """With that of products and that of few pairs, or without them."""
    among: list[Kernel] = []
    if products:
        from kernlib.families.pairwise.kernels.split import Split

        among.append(Split())
    if few:
        from kernlib.families.pairwise.kernels.few import Few

        among.append(Few())
    return *among, DIRECT


def _has_products(descriptor: Pairwise, arch: str) -> bool:
    return arch == lowering.ARCH and descriptor.takes_products


def candidates(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem: each the name of a kernel, or the tile of the
    direct one. There is always one."""
    call = Call(descriptor, problem, (), precision)
    among = _kernels(_has_products(descriptor, arch), lowering.is_few(problem))
    every = kernel.options(among, call, arch)
    return [option.knobs or option.choice for option in every]


def are_several(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> bool:
    """Whether :func:`candidates` are several; as most have two tiles, without the class of
    products."""
    call = Call(descriptor, problem, (), precision)
    on_lanes = kernel.options(_kernels(False, lowering.is_few(problem)), call, arch)
    return len(on_lanes) > 1 or len(candidates(descriptor, problem, arch, precision)) > 1


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
    products = _has_products(descriptor, arch) and bool(choice or lowering.split_pays(problem))
    among = _kernels(products, lowering.is_few(problem))
    option = kernel.choose(among, call, gpu, choice)
    return option.kernel.launch(descriptor, call, gpu, option.knobs)


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for inputs of ``dtypes``."""
    among = _kernels(_has_products(descriptor, arch), True)
    return kernel.specs(among, descriptor, Scope(dtypes, arch), arch)
