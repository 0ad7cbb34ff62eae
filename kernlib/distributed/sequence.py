"""Which positions of a sequence each process has, and what block-sparse attention makes them send.

Blocks of this process's rows and columns are computed where they are. A row whose columns are
elsewhere is computed in one of two ways. Either keys and values of the columns are sent to the
process that has the row: these are its border. Or the queries of the row go to the process that has
the columns, which serves it with a partial result. The first is for windows; the second for a few
rows that see everything, whose columns would be all keys of all processes.
"""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from kernlib.descriptors.base import as_int, check_flag
from kernlib.families.blocksparse.checks import check_layout
from kernlib.families.blocksparse.layout import Layout

# A served row takes its work to another process: only for at most this part of the bytes that its
# keys and values would be.
_WORTH = 0.5
_plans: WeakKeyDictionary[Layout, tuple[int, dict]] = WeakKeyDictionary()


class Rule(NamedTuple):
    """Which columns a row may see by its position, beside the layout."""

    causal: bool
    left: int  # of a window
    right: int


class Weights(NamedTuple):
    """Bytes to send a row of queries and its result back, and a column of keys and values."""

    row: int
    col: int


class Part(NamedTuple):
    """Attention of some rows and columns, by their positions in the sequence."""

    layout: Layout  # of those rows and columns
    rows: torch.Tensor  # positions, int32
    cols: torch.Tensor
    is_cut: bool  # whether the rule leaves out something of a stored block
    is_alike: bool  # whether rows and columns are the same positions, ascending
    is_stretch: bool  # whether rows follow each other without a gap


class Plan(NamedTuple):
    """What one process computes and exchanges. Lists are by rank, of places among the positions of
    this process, or of counts."""

    near: Part  # this process's rows and columns
    border: Part | None  # its rows, and columns that are sent to it
    served: Part | None  # rows that are sent to it, and its columns
    border_rows: torch.Tensor  # places of its rows
    merged_rows: torch.Tensor  # places of rows with results of several parts
    merged_border: torch.Tensor  # where the border's rows are among those
    merged_sent: list[torch.Tensor]  # where rows that are sent are among those
    sent_cols: list[torch.Tensor]
    sent_rows: list[torch.Tensor]
    received_cols: list[int]
    received_rows: list[int]
    has_exchange: bool  # whether any process sends something
    has_partial: bool  # whether any process serves another


def sequence_shards(
    layout: Layout, size: int, *, dim: int = 0, balanced: bool = False
) -> list[torch.Tensor]:
    """The positions of a sequence that each of ``size`` processes has for :func:`attention`, by
    rank: int64 tensors (L_r,) on the CPU, ascending.

    - ``layout``: of (Lq, Lk). Its lengths are dealt out in units that are full blocks of rows and
      of columns, as ``torch.chunk`` deals them, so that later processes may have fewer.
    - ``dim``: 0 for queries, 1 for keys and values. They are the same where Lq is Lk.
    - ``balanced``: the sequence is cut into ``2 size`` pieces, and a process has one from its head
      and one from its tail: with causal attention all processes then have as much work.

    Raises TypeError for what is no layout, ValueError for a size below 1 and another ``dim``.

    Example:
        >>> layout = kl.blocksparse.dense(64, 64, 16)
        >>> [shard[::16].tolist() for shard in kl.distributed.sequence_shards(layout, 2)]
        [[0, 16], [32, 48]]
        >>> shards = kl.distributed.sequence_shards(layout, 2, balanced=True)
        >>> [shard[::16].tolist() for shard in shards]
        [[0, 48], [16, 32]]
    """
    check_layout(layout)
    check_flag("balanced", balanced)
    if as_int("dim", dim) not in (0, 1):
        raise ValueError(f"dim must be 0 for queries or 1 for keys, got {dim}")
    if as_int("size", size) < 1:
        raise ValueError(f"size must be a number of processes, at least 1, got {size}")
    length, unit = layout.shape[dim], math.lcm(*layout.block)
    pieces = 2 * size if balanced else size
    step = unit * max(1, math.ceil(length / unit / pieces))
    cuts = [min(step * piece, length) for piece in range(pieces + 1)]
    ranges = [
        torch.arange(start, stop, dtype=torch.int64, device="cpu") for start, stop in pairwise(cuts)
    ]
    if not balanced:
        return ranges
    return [torch.cat([ranges[rank], ranges[-1 - rank]]) for rank in range(size)]


def counts_of(layout: Layout, size: int, dim: int, balanced: bool) -> list[int]:
    """How many positions each process has, by rank."""
    key, computed = ("counts", size, dim, balanced), _computed(layout)
    if key not in computed:
        shards = sequence_shards(layout, size, dim=dim, balanced=balanced)
        computed[key] = [len(shard) for shard in shards]
    return computed[key]


def digest_of(layout: Layout) -> str:
    """Of the contents of a layout. Waits for its device where they are new."""
    computed = _computed(layout)
    if "digest" not in computed:
        mask = layout.mask().cpu()
        computed["digest"] = hashlib.sha256(mask.numpy().tobytes()).hexdigest()[:16]
    return computed["digest"]


def plan_of(
    layout: Layout, rank: int, size: int, balanced: bool, rule: Rule, weights: Weights
) -> Plan:
    """The plan of a process. Waits for the layout's device where its contents are new."""
    key, computed = (rank, size, balanced, rule, weights), _computed(layout)
    if key not in computed:
        computed[key] = _plan(layout, *key)
    return computed[key]


def _computed(layout: Layout) -> dict:
    """What is remembered of a layout, until its contents are written."""
    writes = sum(t._version for t in layout.tensors if not t.is_inference())
    before = _plans.get(layout)
    if before is None or before[0] != writes:
        before = _plans[layout] = writes, {}
    return before[1]


def _plan(
    layout: Layout, rank: int, size: int, balanced: bool, rule: Rule, weights: Weights
) -> Plan:
    contents = layout.mask().cpu()
    stored = contents if layout.heads is None else contents.any(0)
    rows, cols = (
        [
            shard[::block] // block
            for shard in sequence_shards(layout, size, dim=dim, balanced=balanced)
        ]
        for dim, block in enumerate(layout.block)
    )
    is_seen, is_full = _by_rule(layout, rule)
    stored = stored & is_seen
    row_bytes, col_bytes = (
        weight * block for weight, block in zip(weights, layout.block, strict=True)
    )
    none = rows[0].new_empty(0)
    sent_rows, sent_cols, served_rows, border_cols = ([none] * size for _ in range(4))
    has_exchange = has_partial = False
    is_border = torch.zeros_like(stored)
    for r in range(size):
        for s in range(size):
            if r == s:
                continue
            pair = stored[rows[r]][:, cols[s]]
            moved_rows, moved_cols = _split(pair, row_bytes, col_bytes)
            has_partial |= bool(len(moved_rows))
            has_exchange |= bool(len(moved_rows) or len(moved_cols))
            moved_rows, moved_cols = rows[r][moved_rows], cols[s][moved_cols]
            if r == rank:
                sent_rows[s], border_cols[s] = moved_rows, moved_cols
                is_border[rows[r][:, None], cols[s]] = True
                is_border[moved_rows[:, None], cols[s]] = False
            if s == rank:
                served_rows[r], sent_cols[r] = moved_rows, moved_cols

    def part(rows: torch.Tensor, cols: torch.Tensor, allowed: torch.Tensor | None) -> Part:
        index = rows[:, None], cols
        mask = contents[..., rows[:, None], cols] & is_seen[index]
        if allowed is not None:
            mask = mask & allowed[index]
        is_cut = bool((mask & ~is_full[index]).any())
        local = Layout(mask, layout.block, device=layout.device)
        positions = [
            _positions(each, block) for each, block in zip((rows, cols), layout.block, strict=True)
        ]
        is_alike = torch.equal(*positions) and bool((rows.diff() > 0).all())
        is_stretch = bool((positions[0].diff() == 1).all())
        positions = [each.to(layout.device, torch.int32) for each in positions]
        return Part(local, *positions, is_cut, is_alike, is_stretch)

    def places(blocks: torch.Tensor, among: torch.Tensor, block: int) -> torch.Tensor:
        """Where the positions of blocks are among those of others, which ascend."""
        return _positions(torch.searchsorted(among, blocks), block).to(layout.device)

    all_cols, all_rows = torch.cat(border_cols), torch.cat(served_rows)
    border_rows = rows[rank][(stored & is_border)[rows[rank]].any(1)]
    merged_rows = torch.cat([border_rows, *sent_rows]).unique()
    row_block, col_block = layout.block
    return Plan(
        part(rows[rank], cols[rank], None),
        part(border_rows, all_cols, is_border) if len(all_cols) else None,
        part(all_rows, cols[rank], None) if len(all_rows) else None,
        places(border_rows, rows[rank], row_block),
        places(merged_rows, rows[rank], row_block),
        places(border_rows, merged_rows, row_block),
        [places(each, merged_rows, row_block) for each in sent_rows],
        [places(each, cols[rank], col_block) for each in sent_cols],
        [places(each, rows[rank], row_block) for each in sent_rows],
        [len(each) * col_block for each in border_cols],
        [len(each) * row_block for each in served_rows],
        has_exchange,
        has_partial,
    )


def _split(pair: torch.Tensor, row_bytes: int, col_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the blocks between one process's rows and another's columns: the rows whose queries are
    sent, and the columns whose keys and values are. Rows are sent in the order of their numbers of
    blocks, as many as make the fewest bytes."""
    order = pair.sum(1).argsort(descending=True, stable=True)
    place = torch.arange(1, len(order) + 1, dtype=torch.int64, device="cpu")
    last = place.new_zeros(pair.shape[1])
    if len(order):
        last = (pair[order] * place[:, None]).amax(0)
    # With the first n rows sent, columns are needed that a later row sees.
    needed = torch.bincount(last, minlength=len(order) + 1)
    needed = needed.sum() - needed.cumsum(0)
    count = torch.arange(len(order) + 1, dtype=torch.int64, device="cpu")
    cost = count * row_bytes + needed * col_bytes
    best = int(cost.argmin())
    if not cost[best] <= _WORTH * cost[0]:
        best = 0
    rows = order[:best].sort().values
    return rows[pair[rows].any(1)], (last > best).nonzero()[:, 0]


def _by_rule(layout: Layout, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each block (RB, CB): whether the rule leaves anything of it, and whether it leaves all."""
    row, col = (
        torch.arange(count, dtype=torch.int64, device="cpu") * block
        for count, block in zip(layout.grid, layout.block, strict=True)
    )
    row, last_row = row[:, None], row[:, None] + layout.block[0] - 1
    last_col = col + layout.block[1] - 1
    is_seen = (last_col >= row - rule.left) & (col <= last_row + rule.right)
    is_full = (col >= last_row - rule.left) & (last_col <= row + rule.right)
    if rule.causal:
        is_seen, is_full = is_seen & (col <= last_row), is_full & (last_col <= row)
    return is_seen, is_full


def _positions(blocks: torch.Tensor, block: int) -> torch.Tensor:
    inside = torch.arange(block, dtype=torch.int64, device="cpu")
    return (blocks[:, None] * block + inside).flatten()
