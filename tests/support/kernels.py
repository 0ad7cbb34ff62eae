"""Which kernel of the device code a specification is of."""

from kernlib.jit.spec import KernelSpec


def stem(spec: KernelSpec) -> str:
    """The short name that device code has for the kernel."""
    renamed = next(line for line in spec.source.splitlines() if line.endswith(f" {spec.entry}"))
    return renamed.removeprefix("#define ").removesuffix(f" {spec.entry}")
