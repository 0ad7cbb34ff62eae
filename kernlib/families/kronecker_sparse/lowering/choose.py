"""From a Kronecker-sparse problem to kernels, grids and parameters.

Pure arithmetic on plain data: no tensor, no device. What the generated code depends on is in the
spec; sizes, strides, patterns and the epilogue's parameters are launch arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import by_torch
from kernlib.families.kronecker_sparse.lowering.problem import (
    Layout,
    OutLayout,
    Pattern,
    Problem,
    Scope,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Choice, Gpu, Kernel
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
    "kernels",
    "lower",
    "variants",
]


def kernels() -> tuple[Kernel, ...]:
    """Those that users choose from. Untuned, a problem goes to the first one that takes it, but to
    `portable` if it is small, and batch first with d > 1 to the one that is estimated fastest."""
    return kernel.kernels("kernlib.families.kronecker_sparse.kernels", "factor")


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
    gpu = Gpu(arch, multiprocessors)
    tuned = kernel.match(choice, kernel.options(kernels(), problem, arch)) if choice else None
    option = tuned or kernel.choose(kernels(), problem, gpu)
    if torch_may and tuned is None and by_torch.gains(problem, option.choice, gpu):
        return None
    return option.kernel.launch(epilogue, problem, gpu, option.knobs)


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem, by rank: each the name of a kernel and its
    knobs. There is always one."""
    return kernel.candidates(kernels(), problem, arch)


def default(problem: Problem, multiprocessors: int, arch: str) -> Choice:
    """Of the candidates the one taken untuned."""
    return kernel.choose(kernels(), problem, Gpu(arch, multiprocessors)).choice


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
    of_float = (
        ("fp32", "tf32") if precision is None else ("fp32" if precision == "fp32" else "tf32",)
    )
    numbers = [
        (dtype, each)
        for dtype in dtypes
        for each in (of_float if dtype == "float32" else ("fp32",))
    ]
    scope = Scope(tuple(sizes), tuple(numbers), arch)
    leading = epilogue[: next((i for i, e in enumerate(epilogue) if not e.vectors), len(epilogue))]
    epilogues = dict.fromkeys([epilogue, leading, leading[:1], ()])
    every = (
        spec for each in kernels() for one in epilogues for spec in each.specs(one, scope, arch)
    )
    return list(dict.fromkeys(every))
