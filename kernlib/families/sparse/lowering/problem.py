"""A product with a compressed matrix, as lowering sees it: plain data, no tensor and no device."""

from __future__ import annotations

from collections.abc import Mapping

from kernlib.records import NamedTuple


class Problem(NamedTuple):
    """``out[n, r] = sum_c w[r, c] x[n, c]``, the sums in float32, for ``columns`` vectors n.

    ``x_stride`` elements lie from one vector of x to the next: whole 16 bytes, as its first address
    is. Features lie side by side; where ``x_padded``, memory behind the last one may be read, up to
    a multiple of 8. ``out_strides`` are those of n and r. ``facts`` are what the matrix's format
    says of it.
    """

    rows: int
    cols: int
    columns: int
    dtype: str
    x_stride: int
    x_padded: bool
    out_strides: tuple[int, int]
    facts: tuple[tuple[str, int], ...] = ()

    def fact(self, name: str) -> int:
        """One of ``facts``."""
        return dict(self.facts)[name]


def facts_of(facts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """A format's facts as a problem holds them."""
    return tuple(sorted(facts.items()))
