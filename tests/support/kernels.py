"""Which kernel of the device code a specification is of, and the one launch of a call."""

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered, Step


def stem(spec: KernelSpec) -> str:
    """The short name that device code has for the kernel."""
    renamed = next(line for line in spec.source.splitlines() if line.endswith(f" {spec.entry}"))
    return renamed.removeprefix("#define ").removesuffix(f" {spec.entry}")


def only(lowered: Lowered) -> Step:
    """The launch of a call that has one."""
    (step,) = lowered.steps
    return step
