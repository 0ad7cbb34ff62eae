"""The kinds of kernel that compute pairwise calls: ``split`` by products of tensor cores, which
takes p = 2 and dot products where that pays, and ``direct``, which takes everything.

Each kind's lowering is a module; a choice of ``{"kind": "split"}`` names the first, and a choice of
a tile one of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import direct
from kernlib.families.pairwise.lowering.direct import Problem
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered

SPLIT = {"kind": "split"}


def _split() -> ModuleType:
    """The kernels of products, whose three modules would cost the first call of any other
    descriptor 3 ms."""
    from kernlib.families.pairwise.lowering import split

    return split


def candidates(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem. There is always one."""
    taken = _takes_split(descriptor, problem, arch, precision)
    return [dict(SPLIT)] * taken + direct.candidates(problem, arch)


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
    taken = _takes_split(descriptor, problem, arch, precision)
    wanted = choice or {}
    by_rule = "tile" not in wanted and _split().pays(problem) if taken else False
    if taken and (wanted.get("kind") == SPLIT["kind"] or by_rule):
        return _split().lower(descriptor, problem, arch, multiprocessors, strides, precision)
    return direct.lower(descriptor, problem, arch, multiprocessors, strides, choice)


def specs(
    descriptor: Pairwise, problem: Problem, arch: str, strides: tuple[int, ...], precision: str
) -> list[KernelSpec]:
    """The kernels that a problem takes on the GPUs of an arch, untuned."""
    fewest, most = targets.MULTIPROCESSORS[arch]
    if _takes_split(descriptor, problem, arch, precision) and _split().pays(problem):
        known = direct.candidates(problem, arch)  # of which one is behind the gate
        counts = {direct.default(problem, known, n)["tile"]: n for n in range(fewest, most + 1)}
        given = descriptor, problem, arch
        made = [_split().lower(*given, n, strides, precision) for n in counts.values()]
    else:
        chosen = direct.defaults(problem, arch)
        made = [direct.lower(descriptor, problem, arch, fewest, strides, c) for c in chosen]
    return list(dict.fromkeys(spec for each in made for spec in each.specs))


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for inputs of ``dtypes``."""
    products = _split().variants(descriptor, arch, dtypes) if descriptor.takes_products else []
    return direct.variants(descriptor, arch, dtypes) + products


def _takes_split(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> bool:
    return descriptor.takes_products and _split().takes(descriptor, problem, arch, precision)
