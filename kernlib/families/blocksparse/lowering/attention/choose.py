"""Which kernel computes attention, or its gradients.

Pure arithmetic on plain data: no tensor, no device, and nothing of what a layout holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from kernlib.families.blocksparse.kernels.attention.base import Scope
from kernlib.families.blocksparse.lowering.attention.problem import (
    Attention,
    AttentionGradient,
    Score,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered

# By role. Those of gradients are loaded where a gradient is asked for.
PACKAGES = {
    "forward": "kernlib.families.blocksparse.kernels.attention",
    "gradient": "kernlib.families.blocksparse.kernels.attention.gradient",
}
SQUARES = ((16, 16), (32, 32), (64, 64), (128, 128))
HEAD_DIMENSIONS = (64, 128)  # of what is compiled for nobody in particular


def takes(problem: Attention, arch: str) -> bool:
    """Whether kernels compute a problem, and its gradients, on the GPUs of ``arch``."""
    return any(each.takes(problem, arch) for each in _kernels(problem))


def lower(
    problem: Attention | AttentionGradient,
    arch: str,
    multiprocessors: int,
    choice: Mapping[str, object] | None = None,
) -> Lowered:
    """The launches of a problem that :func:`takes` says yes to, or of the gradients of one: by
    ``choice`` if it is one of the problem's candidates (values may be text), else by rule. Raises
    UnsupportedError for sizes that no grid can hold."""
    gpu = Gpu(arch, multiprocessors)
    option = kernel.choose(_kernels(problem), problem, gpu, choice)
    attention = problem.attention if isinstance(problem, AttentionGradient) else problem
    return option.kernel.launch(attention.score, problem, gpu, option.knobs)


def candidates(problem: Attention | AttentionGradient, arch: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem, by preference: each the name of a kernel and its
    knobs."""
    return kernel.candidates(_kernels(problem), problem, arch)


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
    for block, (features, values), role in product(blocks, widths, PACKAGES):
        scope = Scope(block, dtypes, arch, features, values)
        every = kernel.specs(kernel.kernels(PACKAGES[role], role), score, scope, arch)
        specs.update(dict.fromkeys(every))
    yield from specs


def _kernels(problem: Attention | AttentionGradient) -> tuple[Kernel, ...]:
    role = "gradient" if isinstance(problem, AttentionGradient) else "forward"
    return kernel.kernels(PACKAGES[role], role)
