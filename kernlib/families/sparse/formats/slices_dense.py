"""Dense matrices on the host as codes of u8, u4 and u2, counted and written by numpy.

See :mod:`kernlib.families.sparse.formats.slices` for the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from kernlib.families.sparse.formats.encoding import bits
from kernlib.families.sparse.formats.host import in_threads, nonzero, some_rows
from kernlib.families.sparse.formats.tiling import Tiling
from kernlib.families.sparse.lowering.codes import LANES, Code
from kernlib.lowering.arithmetic import ceil_div


class Steps(NamedTuple):
    """How columns follow each other in a format: the least step that its codes say, and the
    longest. Longer ones take more codes, one for each ``longest`` columns."""

    least: int
    longest: int

    @classmethod
    def of(cls, code: Code) -> Steps:
        return cls(code.least, code.longest)


MOST = 2**31 - 1
ENTRIES = Steps(1, MOST)  # whose codes are the entries themselves
MACKO = Steps(1, 16)  # whose codes are entries of MACKO's format, pads among them


def counts(
    dense: torch.Tensor, requests: Iterable[tuple[Steps, int]]
) -> dict[tuple[Steps, int], torch.Tensor]:
    """Codes of each (panel, row), int32, by steps and width of panels, in one pass over a
    matrix."""
    cells = bits(dense).numpy()
    rows, cols = cells.shape
    requests = list(dict.fromkeys(requests))
    result = {
        (steps, width): np.zeros((rows, ceil_div(cols, width)), np.int32)
        for steps, width in requests
    }

    widths: dict[int, list[Steps]] = {}
    for steps, width in requests:
        widths.setdefault(width, []).append(steps)

    def count(first: int, last: int) -> None:
        some = cells[first:last]
        places = np.flatnonzero(nonzero(some)).astype(np.int32)
        for width, steps_of_width in widths.items():
            panels = _Panels.of(some, width, places)
            for steps, extra in zip(steps_of_width, _extra(panels, steps_of_width), strict=True):
                lengths = panels.lengths + extra
                result[steps, width][first:last] = lengths.reshape(last - first, -1)

    in_threads(count, some_rows(rows, cols), cells.size)
    return {key: torch.from_numpy(np.ascontiguousarray(n.T)) for key, n in result.items()}


def write(
    code: Code,
    dense: torch.Tensor,
    tiling: Tiling,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    data: torch.Tensor,
) -> torch.Tensor:
    """Write all codes into ``data``, by the ``rows`` (panels, slices, lanes) of lanes, -1 for
    none. The sums of the steps of each part, (panels, slices, parts, lanes), int64."""
    matrix, cells = bits(dense).numpy(), data.numpy()
    size = code.size(matrix.itemsize)
    bounds = (offsets.long() * size).tolist()
    numbers = rows.numpy()
    slices = numbers.shape[1]
    sums = np.zeros((len(bounds) - 1, tiling.parts, LANES), np.int64)

    def write_one(place: int) -> None:
        begin, end = bounds[place], bounds[place + 1]
        if end == begin:
            return
        panel, lanes = place // slices, numbers[place // slices, place % slices]
        columns = slice(panel * tiling.width, (panel + 1) * tiling.width)
        some = _rows_of(matrix, lanes, columns)
        length = (end - begin) // size
        sums[place] = _write_slice(code, some, length, tiling.parts, cells[begin:end])

    in_threads(write_one, ((place,) for place in range(len(bounds) - 1)), matrix.size)
    return torch.from_numpy(sums.reshape(*numbers.shape[:2], tiling.parts, LANES))


def _rows_of(held: np.ndarray, lanes: np.ndarray, columns: slice) -> np.ndarray:
    """The cells (32, columns) of the rows of a slice."""
    some = held[np.maximum(lanes, 0), columns]
    some[lanes < 0] = 0
    return some


def _write_slice(
    code: Code, cells: np.ndarray, length: int, parts: int, out: np.ndarray
) -> np.ndarray:
    """The codes of the cells (32, columns) of a slice; the sums of the steps of its parts,
    (parts, lanes)."""
    values = np.zeros((LANES, length), cells.dtype)
    steps = np.zeros((LANES, length), np.uint8)
    _number(code, cells, values, steps)
    part_length = length // parts
    parted = out.reshape(parts, -1)
    values, steps = (t.reshape(LANES, parts, part_length) for t in (values, steps))
    first, at, count = 0, 0, code.group
    while first < part_length:
        groups = (part_length - first) // count
        if groups:
            last = first + groups * count
            nbytes = groups * count * code.size(cells.itemsize)
            _write_groups(
                code,
                values[:, :, first:last].reshape(LANES, parts, groups, count),
                steps[:, :, first:last].reshape(LANES, parts, groups, count),
                parted[:, at : at + nbytes].reshape(parts, groups, -1),
            )
            first, at = last, at + nbytes
        count //= 2
    return (steps.sum(2, dtype=np.int64) + code.least * part_length).T


def _write_groups(code: Code, values: np.ndarray, steps: np.ndarray, out: np.ndarray) -> None:
    """Groups of so many codes, (lanes, parts, groups, count)."""
    lanes, parts, groups, count = values.shape
    run = min(count, 8)
    runs = values.reshape(lanes, parts, groups, count // run, run).transpose(1, 2, 3, 0, 4)
    end = count * lanes * values.itemsize
    out[:, :, :end] = np.ascontiguousarray(runs).view(np.uint8).reshape(parts, groups, end)
    width = count * code.bits // 8  # bytes of a lane's steps
    shares = steps.reshape(lanes, parts, groups, count // width, width)
    joined = shares[:, :, :, 0].copy()
    for share in range(1, count // width):
        joined |= shares[:, :, :, share] << np.uint8(share * code.bits)
    out[:, :, end:] = joined.transpose(1, 2, 0, 3).reshape(parts, groups, lanes * width)


def _number(code: Code, cells: np.ndarray, values: np.ndarray, steps: np.ndarray) -> None:
    """Put each entry at its number in its lane, and its step where the codes that lead to it
    begin."""
    lanes, cols = cells.shape
    length = values.shape[1]
    panels = _Panels.of(cells, cols)
    places, counts = panels.places, panels.lengths
    if not places.size:
        return
    remaining = panels.steps(code.least)
    ends = np.arange(places.size + 1, dtype=np.int32)  # of each entry's codes, through all rows
    several = np.flatnonzero(remaining > code.longest)
    if several.size:
        more = np.zeros(places.size + 1, np.int32)
        more[several + 1] = _more(remaining[several], Steps.of(code))
        ends += more.cumsum(dtype=np.int32)
    begins = np.arange(lanes, dtype=np.int32) * length - 1 - ends[panels.ends]
    if code.least:  # what fills up a row comes first
        begins += length - (ends[panels.ends + counts] - ends[panels.ends])
    begins = np.repeat(begins, counts)
    number, first = ends[1:] + begins, ends[:-1] + begins  # through all lanes; of the code before
    if code.least:
        columns = places + np.repeat(np.arange(lanes, dtype=np.int32) * (length - cols), counts)
        np.minimum(number, columns, out=number)
        columns -= remaining
        np.minimum(first, columns, out=first)
        remaining += first
        remaining -= number
    first += 1
    values.reshape(-1)[number] = cells.reshape(-1)[places]
    flat = steps.reshape(-1)
    flat[first] = np.minimum(remaining, code.mask)
    if several.size:
        _write_far(code, flat, first[several], remaining[several])


def _write_far(code: Code, steps: np.ndarray, first: np.ndarray, left: np.ndarray) -> None:
    """Steps that may take several codes from ``first`` on. All codes but the last have the longest
    step."""
    count = (left + code.mask - 1) // code.mask
    owner = np.repeat(np.arange(count.size), count)
    index = np.arange(owner.size) - np.repeat(count.cumsum() - count, count)
    steps[first[owner] + index] = np.minimum(left[owner] - code.mask * index, code.mask)


class _Panels(NamedTuple):
    """The entries of some rows, panel by panel: their cells, counted through all rows; and of each
    panel of a row its first cell, the number of its first entry, and how many it has."""

    places: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, cells: np.ndarray, width: int, places: np.ndarray | None = None) -> _Panels:
        rows, cols = cells.shape
        if places is None:
            places = np.flatnonzero(nonzero(cells)).astype(np.int32)
        begins = np.arange(rows)[:, None] * cols + np.arange(0, max(cols, 1), width)
        begins = begins.reshape(-1)
        ends = np.searchsorted(places, begins)
        return cls(places, begins, ends, np.diff(ends, append=places.size))

    def steps(self, least: int) -> np.ndarray:
        """Columns from each entry to the one before it in its panel; to the first column, and so
        many more, where there is none."""
        steps = np.empty_like(self.places)
        np.subtract(self.places[1:], self.places[:-1], out=steps[1:])
        some = self.lengths > 0
        firsts = self.ends[some]
        steps[firsts] = self.places[firsts] - self.begins[some] + least
        return steps


def _extra(panels: _Panels, every: list[Steps]) -> list[np.ndarray]:
    """Codes of each panel of a row besides one for each entry, by several steps."""
    shortest = min(how.longest for how in every)
    if shortest >= MOST:
        return [np.zeros_like(panels.lengths) for _ in every]
    steps = panels.steps(1)
    several = np.flatnonzero(steps > shortest)
    steps, owner = steps[several], np.searchsorted(panels.ends, several, side="right") - 1
    firsts = panels.ends[owner] == several
    extra = []
    for how in every:
        more = _more(steps if how.least else steps - firsts, how)
        extra.append(np.bincount(owner, more, panels.lengths.size).astype(np.int64))
    return extra


def _more(steps: np.ndarray, how: Steps) -> np.ndarray:
    """Codes that each entry takes besides its own."""
    if how.longest & how.longest - 1 == 0:
        return steps - how.least >> how.longest.bit_length() - 1
    return np.maximum(steps - 1, 0) // how.longest
