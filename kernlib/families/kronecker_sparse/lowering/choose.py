"""From a Kronecker-sparse problem to kernels, grids and parameters.

Pure arithmetic on plain data: no tensor, no device. What the generated code depends on is in the
spec; sizes, strides, patterns and the epilogue's parameters are launch arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering.problem import Pattern, Problem, Scope, is_deep
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered

PACKAGES = GRADIENT, LANES, FACTOR = tuple(
    f"kernlib.families.kronecker_sparse.kernels.{name}" for name in ("gradient", "lanes", "factor")
)


def kernels(problem: Problem | None = None) -> tuple[Kernel, ...]:
    """Those that users choose from, by rank; of a problem without those of packages that take no
    such problem, whose modules a first call would import for nothing. Untuned, a problem goes to
    the first one that takes it, but to `portable` if it is small, and batch first with d > 1 to the
    one that is estimated fastest."""
    packages = PACKAGES
    if problem is not None and is_deep(problem):
        packages = GRADIENT, FACTOR
    elif problem is not None:
        packages = (LANES, FACTOR) if problem.lanes > 1 else (FACTOR,)
    return tuple(each for package in packages for each in kernel.kernels(package, "factor"))


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
    gpu, among = Gpu(arch, multiprocessors), kernels(problem)
    tuned = kernel.match(choice, kernel.options(among, problem, arch)) if choice else None
    option = tuned or kernel.choose(among, problem, gpu)
    if torch_may and tuned is None and option.kernel.name == "portable":
        # Nobody measured torch against other kinds.
        from kernlib.families.kronecker_sparse.lowering import by_torch

        if by_torch.gains(problem, option.choice, gpu):
            return None
    return option.kernel.launch(epilogue, problem, gpu, option.knobs)


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """What :func:`lower` can choose for a problem, by rank: each the name of a kernel and its
    knobs. There is always one."""
    return kernel.candidates(kernels(problem), problem, arch)


def default(problem: Problem, multiprocessors: int, arch: str) -> Choice:
    """Of the candidates the one taken untuned."""
    return kernel.choose(kernels(problem), problem, Gpu(arch, multiprocessors)).choice


def variants(
    epilogue: tuple[Epilogue, ...],
    pattern: Pattern,
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
    of_float = ("fp32", "tf32") if precision is None else (precision,)
    numbers = [
        (dtype, each)
        for dtype in dtypes
        for each in (of_float if dtype == "float32" else ("fp32",))
    ]
    scope = Scope(tuple(sizes), tuple(numbers), arch)
    leading = tuple(takewhile(lambda part: part.vectors, epilogue))
    epilogues = dict.fromkeys([epilogue, leading, leading[:1], ()])
    every = (
        spec for each in kernels() for one in epilogues for spec in each.specs(one, scope, arch)
    )
    return list(dict.fromkeys(every))
