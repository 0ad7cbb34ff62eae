"""Products of bitmap matrices whose values have fewer bits: the kernels of
:mod:`kernlib.families.sparse.lowering.bitmap`, of their codes."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering import bitmap
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.families.sparse.lowering.value_codes import QUANTISED, ValueCode
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered


class QuantisedKernels:
    """The kernels of one code."""

    ahead = staticmethod(bitmap.ahead)

    def __init__(self, code: ValueCode):
        self.codes = code.values

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernels compute a problem: half types, up to 16 vectors."""
        return bitmap.takes(problem, arch, self.codes)

    def lower(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
    ) -> Lowered:
        """The launches of a call. Raises UnsupportedError where :meth:`takes` says no."""
        return bitmap.lower(epilogue, problem, arch, multiprocessors, self.codes)

    def variants(
        self, epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
    ) -> list[KernelSpec]:
        """Every spec that :meth:`lower` can choose."""
        return bitmap.variants(epilogue, dtypes, arch, self.codes)


KERNELS = {name: QuantisedKernels(code) for name, code in QUANTISED.items()}
