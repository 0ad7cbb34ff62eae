"""What a plan of half types reads and writes of float32 tensors, such as the master weights of
mixed precision and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.kronecker_sparse.kernels.steps.transpose import ALIGNMENT
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

WIDE = "float32"
THREADS = 256
CHUNK = 8  # elements of a thread
ARRAYS = 3  # of one launch
FIXED = Fields((f"i64 count[{ARRAYS}]", "i64 vectors"))  # whether all begin at whole 16 bytes

Pointer = tuple[str, int]


class Cast(Kernel):
    """Casts up to ARRAYS arrays of one dtype to another."""

    role = "step"
    name = "cast"
    header = "kronecker_sparse/cast.cuh"
    entry = "kronecker_sparse_cast"
    reason = "float32 tensors as half types, or back, for master weights"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        source: str
        target: str

    def step(
        self,
        source: str,
        target: str,
        arrays: list[tuple[Pointer, Pointer, int]],
        is_aligned: bool,
    ) -> Step:
        """The launch that casts arrays, each read from one place and written to another."""
        counts = [count for *_, count in arrays]
        blocks = ceil_div(sum(ceil_div(count, CHUNK) for count in counts), THREADS)
        unused = ARRAYS - len(arrays)
        fixed = FIXED.pack(count=[*counts, *[0] * unused], vectors=is_aligned)
        (first, to, _), *_ = arrays
        sources = [each[0] for each in arrays] + [first] * unused
        targets = [each[1] for each in arrays] + [to] * unused
        spec = self.spec((), self.Variant(source, target))
        return Step(spec, (blocks, 1), fixed, (*sources, *targets))

    def specs_of(self, dtypes: Iterable[str]) -> list[KernelSpec]:
        """Every specification that :func:`lower` can take for half ``dtypes``."""
        pairs = (pair for dtype in dtypes for pair in ((WIDE, dtype), (dtype, WIDE)))
        return [self.spec((), self.Variant(*pair)) for pair in pairs]

    def spec(self, subject: tuple, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant."""
        source, target = variant
        facts = {
            "InputT": DTYPES[source].cuda,
            "OutputT": DTYPES[target].cuda,
            "ARRAYS": ARRAYS,
            "PARAMETER_BYTES": Parameters(2 * ARRAYS, FIXED.format).size,
        }
        return self.named_spec(self.source(facts, FIXED.text()), THREADS, 0, source, [target])


def lower(
    lowered: Lowered,
    dtype: str,
    read: Mapping[str, int],
    written: Mapping[str, int],
    is_aligned: bool = True,
) -> Lowered:
    """Launches that take tensors of a half ``dtype``, with float32 ones in the place of some: those
    of ``read`` are rounded before the first launch, and ``written`` are what it widens behind the
    last. Both are numbers of elements by names, at most ARRAYS each. ``is_aligned`` says whether
    the float32 tensors begin at whole 16 bytes."""
    rooms: dict[str, Pointer] = {}
    size = 0
    for name, count in (*read.items(), *written.items()):
        rooms[name] = WORKSPACE, size
        size += round_up(count * DTYPES[dtype].bytes, ALIGNMENT)
    places = {**rooms, WORKSPACE: (WORKSPACE, size)}
    steps = [step.placed(places) for step in lowered.steps]
    if read:
        arrays = [((name, 0), rooms[name], count) for name, count in read.items()]
        steps.insert(0, Cast().step(WIDE, dtype, arrays, is_aligned))
    if written:
        arrays = [(rooms[name], (name, 0), count) for name, count in written.items()]
        steps.append(Cast().step(dtype, WIDE, arrays, True))
    return Lowered(tuple(steps), size + lowered.workspace)
