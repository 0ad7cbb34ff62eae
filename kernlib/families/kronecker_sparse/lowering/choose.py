"""From a Kronecker-sparse problem to kernels, grids and parameters.

Pure arithmetic on plain data: no tensor, no device. What the generated code depends on is in the
spec; sizes, strides, patterns and the epilogue's parameters are launch arguments. Each kind of
kernel has a module of its own, which KINDS names; every module has

    candidates(problem, arch) -> choices of that kind for a problem, none if it does not take it
    default(problem, known, multiprocessors) -> the one of these taken untuned
    lower(epilogue, problem, arch, multiprocessors, choice) -> Lowered
    specs(epilogue, problem, arch, choice) -> the specs of that on all GPUs of an arch
    variants(epilogues, sizes, arch, kinds) -> every spec that its lower() can choose
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import (
    by_torch,
    hopper,
    interleaved,
    interleaved_gradient,
    portable,
    times,
    transpose,
    via_batch_last,
    weight_gradient,
)
from kernlib.families.kronecker_sparse.lowering.problem import (
    DEEP,
    Layout,
    OutLayout,
    Pattern,
    Problem,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import choice as choices
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered, Step

__all__ = [
    "Choice",
    "Layout",
    "Lowered",
    "OutLayout",
    "Problem",
    "Step",
    "candidates",
    "default",
    "lower",
    "variants",
]

# By preference: untuned, a problem goes to the first kind that has a candidate for it, but to
# `portable` if it is small, and batch first with d > 1 to the one that `times` says is fastest.
_MODULES = (
    interleaved_gradient,
    transpose,
    weight_gradient,
    interleaved,
    via_batch_last,
    hopper,
    portable,
)
KINDS: dict[str, ModuleType] = {kind.KIND: kind for kind in _MODULES}


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Mapping[str, object] | None = None,
    torch_may: bool = False,
) -> Lowered | None:
    """Choose the kernels for a call: by ``choice`` if it is one of the problem's candidates (values
    may be text), else by rule, which answers None where ``torch_may`` compute the call and takes
    clearly less time. Raises UnsupportedError for sizes no grid can hold."""
    known = candidates(problem, arch)
    chosen = choices.named(choice, known)
    if chosen is None:
        chosen = default(problem, known, multiprocessors)
        if torch_may and by_torch.gains(problem, chosen, (arch, multiprocessors)):
            return None
    kind, own = _apart(chosen)
    return kind.lower(epilogue, problem, arch, multiprocessors, own)


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem, by preference: each the name of a kind and its
    knobs. There is always one."""
    known = [
        {"kind": name, **choice}
        for name, kind in KINDS.items()
        for choice in kind.candidates(problem, arch)
    ]
    first = _first(problem, known)
    return sorted(known, key=lambda choice: choice["kind"] != first)


def _first(problem: Problem, known: list[Choice]) -> str:
    """The kind that a problem goes to untuned."""
    if times.knows(problem) and known[0]["kind"] in (interleaved.KIND, via_batch_last.KIND):
        return times.fastest(problem, known)
    return portable.KIND if is_small(problem) else known[0]["kind"]


def is_small(problem: Problem) -> bool:
    """Whether a problem has so few rows that packing the weight costs more than the kinds which ask
    for it gain: on an H200 (1, 768, 192, 2) in float32, 64 rows, takes 16.4 us by `interleaved` and
    10.9 by `portable`, whose host makes one launch instead of two. Of a long depth it makes two."""
    half = problem.dtype != "float32"
    if problem.rows > (64 if half else 128) or problem.depth > (192 if half else DEEP - 1):
        return False
    # Batch first, `portable` reads and writes each l by itself.
    batch_last = problem.rows > 1 and problem.left.line == problem.out.row == 1
    return batch_last or problem.lanes <= 4 or problem.rows <= 16


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned."""
    kind, _ = _apart(known[0])
    own = [_apart(choice)[1] for choice in known if choice["kind"] == known[0]["kind"]]
    is_split = problem.depth >= 2 * portable.MIN_SPLIT  # where there are few tiles
    if kind is portable and times.knows(problem) and not is_split:
        chosen = min(own, key=lambda tile: times.of_portable(problem, tile, multiprocessors))
    else:
        chosen = kind.default(problem, own, multiprocessors)
    return {"kind": known[0]["kind"], **chosen}


def variants(
    epilogue: tuple[Epilogue, ...],
    pattern: Pattern,
    batch_last: bool,
    arch: str,
    dtypes: tuple[str, ...],
    precision: str | None,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for a factor and inputs of ``dtypes``, whatever
    their batch, strides and alignment: with the whole epilogue, with its leading vectors alone (as
    where a gradient is recorded), and with none, as the gradients by x and by the weight have.

    ``precision`` decides for float32; None stands for both.
    """
    _, *sizes = pattern
    wanted = ("fp32", "tf32") if precision is None else ("fp32" if precision == "fp32" else "tf32",)
    kinds = [
        (dtype, each) for dtype in dtypes for each in (wanted if dtype == "float32" else ("fp32",))
    ]
    leading = epilogue[: next((i for i, e in enumerate(epilogue) if not e.vectors), len(epilogue))]
    epilogues = list(dict.fromkeys([epilogue, leading, leading[:1], ()]))
    found = [
        spec
        for kind in KINDS.values()
        for spec in kind.variants(epilogues, tuple(sizes), arch, kinds)
    ]
    return list(dict.fromkeys(found))


def _apart(choice: Choice) -> tuple[ModuleType, Choice]:
    """The module of a choice's kind, and the choice without its name."""
    own = dict(choice)
    return KINDS[own.pop("kind")], own
