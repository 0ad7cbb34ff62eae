"""From attention, and its gradients, to kernels, grids and parameters, by the kinds of kernels that
there are.

Pure arithmetic on plain data: no tensor, no device, and nothing of what a layout holds. Each kind
is a module named in a table below, by preference, and loaded when it is asked: a first call that
the first kind takes needs none of the others, nor those of gradients, which would cost it 2 ms.
A module has

    KIND                                                        its name
    takes(problem, arch) -> whether it computes a problem
    candidates(problem, arch) -> the choices for a problem, by preference
    default(problem, known, multiprocessors) -> the one of these taken untuned
    lower(problem, arch, multiprocessors, choice) -> Lowered
    variants(score, block, dtypes, arch, features=, values=) -> every spec that its lower() can
                                                                choose for blocks and widths

and, where it is not the fastest for all that it takes,

    pays(problem, multiprocessors) -> whether it goes before the next kind that takes it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import product
from types import ModuleType

from kernlib.families.blocksparse.lowering.attention.problem import (
    Attention,
    AttentionGradient,
    Score,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import choice as choices
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered

FORWARD = ("hopper", "portable")
GRADIENTS = ("hopper_gradient", "portable_gradient")
SQUARES = ((16, 16), (32, 32), (64, 64), (128, 128))
HEAD_DIMENSIONS = (64, 128)  # of what is compiled for nobody in particular


def takes(problem: Attention, arch: str) -> bool:
    """Whether kernels compute a problem, and its gradients, on the GPUs of ``arch``."""
    return any(kind.takes(problem, arch) for kind in _kinds(problem))


def lower(
    problem: Attention | AttentionGradient,
    arch: str,
    multiprocessors: int,
    choice: Mapping[str, object] | None = None,
) -> Lowered:
    """The launches of a problem that :func:`takes` says yes to, or of the gradients of one: by
    ``choice`` if it is one of the problem's candidates (values may be text), else by rule. Raises
    UnsupportedError for sizes that no grid can hold."""
    named = choices.named(choice, candidates(problem, arch)) if choice else None
    if named:
        knobs = dict(named)
        name = knobs.pop("kind")
        kind = next(kind for kind in _taking(problem, arch) if name == kind.KIND)
    else:
        kind = _default(problem, arch, multiprocessors)
        knobs = kind.default(problem, kind.candidates(problem, arch), multiprocessors)
    return kind.lower(problem, arch, multiprocessors, knobs)


def candidates(problem: Attention | AttentionGradient, arch: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem, by preference: each the name of a kind and its
    knobs."""
    return [
        {"kind": kind.KIND, **knobs}
        for kind in _taking(problem, arch)
        for knobs in kind.candidates(problem, arch)
    ]


def variants(
    score: Score,
    dtypes: tuple[str, ...],
    arch: str,
    blocks: tuple[tuple[int, int], ...] = SQUARES,
    widths: tuple[tuple[int, int], ...] = tuple((n, n) for n in HEAD_DIMENSIONS),
) -> Iterator[KernelSpec]:
    """Every spec that lowering may choose for layouts of these ``blocks`` and ``widths``, the
    features of q and k, and of v, and for gradients by q, k and v."""
    specs: dict[KernelSpec, None] = {}
    for block, (features, values) in product(blocks, widths):
        for kind in _modules((*FORWARD, *GRADIENTS)):
            known = {"features": features, "values": values}
            specs.update(dict.fromkeys(kind.variants(score, block, dtypes, arch, **known)))
    yield from specs


def _modules(kinds: tuple[str, ...]) -> Iterator[ModuleType]:
    return (import_module(f"{__package__}.{kind}") for kind in kinds)


def _kinds(problem: Attention | AttentionGradient) -> Iterator[ModuleType]:
    return _modules(GRADIENTS if isinstance(problem, AttentionGradient) else FORWARD)


def _taking(problem: Attention | AttentionGradient, arch: str) -> Iterator[ModuleType]:
    return (kind for kind in _kinds(problem) if kind.takes(problem, arch))


def _default(problem: Attention | AttentionGradient, arch: str, multiprocessors: int) -> ModuleType:
    """The kind that is taken untuned: the first that takes the problem and pays, or the last."""
    for kind in _taking(problem, arch):
        if not hasattr(kind, "pays") or kind.pays(problem, multiprocessors):
            break
    return kind
