"""From a block-sparse product to kernels, grids and parameters, by the kinds of kernels there are.

Pure arithmetic on plain data: no tensor, no device, and nothing of what a layout holds. What the
generated code depends on is in the spec; sizes, strides and the epilogue's parameters are launch
arguments. Each kind is a module that its product's table names, by preference, with

    KIND                                                        its name
    takes(problem, arch) -> whether it computes a problem
    lower(epilogue, problem, arch, multiprocessors) -> Lowered
    variants(epilogue, block, dtypes, arch) -> every spec that its lower() can choose

and, where there is a choice or float32 is taken,

    candidates(problem, arch) -> the choices for a problem, by preference
    default(problem, known, multiprocessors) -> the one of these taken untuned
    PRECISION   whether variants() takes the precision of float32 as well, None for both

and, where it is not the fastest for all that it takes,

    pays(problem, multiprocessors) -> whether it goes before the next kind that takes it

A module with candidates takes one of them as the last argument of lower().
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.lowering import (
    decode,
    hopper,
    hopper_words,
    narrow,
    portable,
    sampled,
    sampled_hopper,
    stationary,
    tiles,
)
from kernlib.families.blocksparse.lowering.problem import Sdd, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import choice as choices
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered

SPMM: tuple[ModuleType, ...] = (decode, hopper, hopper_words, narrow, portable)
SDD: tuple[ModuleType, ...] = (stationary, tiles, sampled_hopper, sampled)


def takes(problem: Spmm | Sdd, arch: str) -> bool:
    """Whether some kernel computes a problem."""
    return bool(_taking(problem, arch))


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Spmm | Sdd,
    arch: str,
    multiprocessors: int,
    choice: Mapping[str, object] | None = None,
) -> Lowered:
    """The launches of a problem: by ``choice`` if it is one of the problem's candidates (values may
    be text), else by rule. Raises UnsupportedError for sizes that no grid can hold."""
    known = candidates(problem, arch)
    own = dict(choices.named(choice, known) or default(problem, known, multiprocessors))
    kind = _named(problem, own.pop("kind"))
    chosen = (own,) if hasattr(kind, "candidates") else ()
    return kind.lower(epilogue, problem, arch, multiprocessors, *chosen)


def candidates(problem: Spmm | Sdd, arch: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem, by preference: each the name of a kind and its
    knobs."""
    return [
        {"kind": kind.KIND, **choice}
        for kind in _taking(problem, arch)
        for choice in (kind.candidates(problem, arch) if hasattr(kind, "candidates") else ({},))
    ]


def default(problem: Spmm | Sdd, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: of the first kind that pays."""
    name = _first(problem, known, multiprocessors)
    kind = _named(problem, name)
    if not hasattr(kind, "default"):
        return next(choice for choice in known if choice["kind"] == name)
    own = [
        {knob: value for knob, value in choice.items() if knob != "kind"}
        for choice in known
        if choice["kind"] == name
    ]
    return {"kind": name, **kind.default(problem, own, multiprocessors)}


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
    found = []
    for kind in SDD if mode == "sdd" else SPMM:
        more = (precision,) if getattr(kind, "PRECISION", False) else ()
        found += kind.variants(epilogue, block, dtypes, arch, *more)
    return list(dict.fromkeys(found))


def _first(problem: Spmm | Sdd, known: list[Choice], multiprocessors: int) -> object:
    """The first kind of these that pays; the last one always does."""
    names = list(dict.fromkeys(choice["kind"] for choice in known))
    for name in names[:-1]:
        kind = _named(problem, name)
        if not hasattr(kind, "pays") or kind.pays(problem, multiprocessors):
            return name
    return names[-1]


def _kinds(problem: Spmm | Sdd) -> tuple[ModuleType, ...]:
    return SDD if isinstance(problem, Sdd) else SPMM


def _named(problem: Spmm | Sdd, name: object) -> ModuleType:
    return {kind.KIND: kind for kind in _kinds(problem)}[name]


def _taking(problem: Spmm | Sdd, arch: str) -> list[ModuleType]:
    return [kind for kind in _kinds(problem) if kind.takes(problem, arch)]
