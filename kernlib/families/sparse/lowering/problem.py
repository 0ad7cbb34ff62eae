"""A product with a compressed matrix, as lowering sees it: plain data, no tensor and no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernlib.lowering.dtypes import DTYPES

# Targets whose launches may overlap the one before.
OVERLAPPING = ("sm_90a", "sm_100", "sm_103", "sm_107", "sm_110", "sm_120", "sm_121")
POINTER_TYPES = ("int", "i64")  # CUDA types of row_ptr in MACKO's format, the second if it is wide


class Problem(NamedTuple):
    """``out[n, r] = sum_c w[r, c] x[n, c]``, the sums in float32, for ``columns`` vectors n.

    ``x_stride`` elements lie from one vector of x to the next: whole 16 bytes, as its first address
    is. Features lie side by side; where ``x_padded``, memory behind the last one may be read, up to
    a multiple of 8. ``out_strides`` are those of n and r. ``facts`` are what the matrix's
    ``format`` says of it. A ``frozen`` matrix is written by nothing: it may be read before the
    launch before has ended.
    """

    rows: int
    cols: int
    columns: int
    dtype: str
    x_stride: int
    x_padded: bool
    out_strides: tuple[int, int]
    facts: tuple[tuple[str, int], ...] = ()
    format: str = ""
    frozen: bool = False

    def fact(self, name: str) -> int:
        """One of ``facts``."""
        return dict(self.facts)[name]


class Scope(NamedTuple):
    """What is known of products whose kernels are compiled ahead: the format, dtypes, the
    target."""

    format: str
    dtypes: tuple[str, ...]
    arch: str

    @property
    def halves(self) -> Scope:
        """Of its dtypes those of 2 bytes."""
        return self._replace(dtypes=tuple(d for d in self.dtypes if DTYPES[d].bytes == 2))


def facts_of(facts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """A format's facts as a problem holds them."""
    return tuple(sorted(facts.items()))
