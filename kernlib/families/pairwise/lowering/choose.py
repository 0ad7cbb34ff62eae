"""The kinds of kernel that compute pairwise calls: ``few``, which takes few pairs, ``split`` by
products of tensor cores, which takes p = 2 and dot products where that pays, and ``direct``, which
takes everything.

Each kind's lowering is a module; a choice of ``{"kind": "few"}`` or ``{"kind": "split"}`` names one
of the first two, and a choice of a tile one of the third.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import direct, few
from kernlib.families.pairwise.lowering.direct import Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered

SPLIT, FEW, DIRECT = {"kind": "split"}, {"kind": "few"}, {"kind": "direct"}


def _split() -> ModuleType:
    """The kernels of products, whose three modules would cost the first call of any other
    descriptor 3 ms."""
    from kernlib.families.pairwise.lowering import split

    return split


def candidates(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem. There is always one."""
    kinds = [SPLIT] * _takes_split(descriptor, problem, arch, precision)
    kinds += [FEW] * few.takes(problem)
    return [*map(dict, kinds), *direct.candidates(problem, arch)]


def lower(
    descriptor: Pairwise,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    strides: tuple[int, ...],
    precision: str,
    choice: Mapping[str, object] | None = None,
) -> Lowered:
    """The launches of a call: by ``choice`` if it is one of the candidates, else by rule."""
    wanted = choice or {}
    split = _takes_split(descriptor, problem, arch, precision)
    if "tile" in wanted:
        kind = DIRECT
    elif wanted == FEW and few.takes(problem):
        kind = FEW
    elif wanted == SPLIT and split:
        kind = SPLIT
    else:
        kind = _default(problem, split, multiprocessors)
    if kind is SPLIT:
        return _split().lower(descriptor, problem, arch, multiprocessors, strides, precision)
    if kind is FEW:
        return few.lower(descriptor, problem, strides)
    return direct.lower(descriptor, problem, arch, multiprocessors, strides, choice)


def _default(problem: Problem, split: bool, multiprocessors: int) -> Choice:
    """The kind that is taken untuned; ``split`` is whether that one takes the problem."""
    products = _split().time_us(problem) if split and _split().pays(problem) else float("inf")
    if (
        few.pays(problem, multiprocessors)
        and few.time_ns(problem, multiprocessors) < 1e3 * products
    ):
        return FEW
    return SPLIT if products < float("inf") else DIRECT


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for inputs of ``dtypes``."""
    products = _split().variants(descriptor, arch, dtypes) if descriptor.takes_products else []
    made = few.variants(descriptor, dtypes)
    return direct.variants(descriptor, arch, dtypes) + made + products


def _takes_split(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> bool:
    return descriptor.takes_products and _split().takes(descriptor, problem, arch, precision)
