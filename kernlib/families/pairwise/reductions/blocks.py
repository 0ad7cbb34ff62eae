"""Reductions of a kernel matrix by blocks: each is computed, reduced and forgotten, so that memory
stays O(M + N) plus one block. These are the reductions that kernels without stored blocks do not
take: many columns; of float64 the k nearest; log-sum-exps and minima of many features; many
nearest; CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernlib.families.pairwise.gradients.autograd import kernel_matrix
from kernlib.families.pairwise.gradients.products import multiplied
from kernlib.families.pairwise.reductions.arguments import Request, Shape
from kernlib.runtime import rehearsal
from kernlib.runtime.dtypes import accumulator

BLOCK_BYTES = 1 << 26
CPU_BLOCK_BYTES = 1 << 24  # which stay in a core's cache between the block's two passes
_ALIGNED = 8  # points of half types, of any number of features, behind which alignment is the same
MOST_TERMS = 1 << 16  # of a row, from which on the CPU adds up the sums of 64 blocks and more
MOST_ROWS = 4096  # of a block of many columns: enough for a product to be bound by arithmetic

Block = tuple[slice, slice, slice]  # of the batch, of rows and of columns


def blocks(shape: Shape, entries: int, fewest_rows: int) -> Iterator[Block]:
    """Parts of at most ``entries`` of a matrix, row after row. A part has all columns, unless that
    leaves it with less than ``fewest_rows`` of several. In a rehearsal the first of those alone
    that take the same kernels: of one size, whose points begin at addresses of one alignment."""
    parts = _blocks(shape, entries, fewest_rows)
    if rehearsal.current() is None:
        return parts
    kinds: dict[tuple, Block] = {}
    for block in parts:
        kinds.setdefault(tuple((s.stop - s.start, s.start % _ALIGNED) for s in block), block)
    return iter(kinds.values())


def _blocks(shape: Shape, entries: int, fewest_rows: int) -> Iterator[Block]:
    if 0 in (shape.m, shape.n, shape.batch):
        return
    columns = min(shape.n, entries)
    rows = min(shape.m, entries // columns)
    if rows < min(shape.m, fewest_rows):
        rows = min(shape.m, fewest_rows, entries)
        columns = min(shape.n, entries // rows)
    is_all = (rows, columns) == (shape.m, shape.n)
    for l in _slices(shape.batch, max(1, entries // (rows * columns)) if is_all else 1):
        for m in _slices(shape.m, rows):
            for n in _slices(shape.n, columns):
                yield l, m, n


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def entries_of(device: torch.device, dtype: torch.dtype, most: int = BLOCK_BYTES) -> int:
    """Entries of a block of a dtype, which takes ``most`` bytes on a GPU."""
    return (CPU_BLOCK_BYTES if device.type == "cpu" else most) // dtype.itemsize


def points_of(t: torch.Tensor, batch: slice, points: slice) -> torch.Tensor:
    """The part of a tensor (N, C) or (L, N, C) in a block."""
    several = t.dim() == 3 and t.shape[0] > 1
    return (t[batch] if several else t)[..., points, :]


def numbers_of(values: dict, batch: slice) -> dict:
    """The part of hyperparameters in a block: of tensors (L,) a slice."""
    return {
        name: value[batch] if isinstance(value, torch.Tensor) and value.numel() > 1 else value
        for name, value in values.items()
    }


def values_of(request: Request, block: Block) -> dict:
    """The part of hyperparameters in a block, and of the codes and tables of categories."""
    batch, rows, columns = block
    values = request.hyperparameters
    if not request.descriptor.categories:
        return numbers_of(values, batch)
    tables = values["tables"]
    several = isinstance(tables, torch.Tensor) and tables.dim() == 4 and tables.shape[0] > 1
    codes = {
        "a_codes": points_of(values["a_codes"], batch, rows),
        "b_codes": points_of(values["b_codes"], batch, columns),
        "tables": tables[batch] if several else tables,
    }
    rest = {name: value for name, value in values.items() if name not in codes}
    return numbers_of(rest, batch) | codes


def matrix(request: Request, block: Block, a, b, values: dict, out=None) -> torch.Tensor:
    """A block of the matrix, (L, M, N), from its points and hyperparameters."""
    a = a if a.dim() == 3 else a[None]
    row_offset = request.row_offset + block[1].start
    col_offset = request.col_offset + block[2].start
    if request.descriptor.categories and not rehearsal.is_traced():
        from kernlib.families.pairwise.categories import operation

        return operation.run(request.descriptor, a, b, out, False, row_offset, col_offset, values)
    return kernel_matrix(request.descriptor, a, b, out, row_offset, col_offset, **values)


def each(request: Request, shape: Shape, at_least: int = 1, whole_rows: bool = False):
    """Every block, of ``at_least`` so many entries, and its values, in the arithmetic's dtype and
    in memory that they share."""
    dtype, device = accumulator(request.a.dtype), request.a.device
    entries, memory = max(at_least, entries_of(device, dtype)), None
    for block in blocks(shape, entries, 1 if whole_rows else MOST_ROWS):
        size = tuple(part.stop - part.start for part in block)
        count = size[0] * size[1] * size[2]
        if memory is None:  # the first block is the largest
            memory = torch.empty(count, dtype=dtype, device=device)
        a, b = points_of(request.a, *block[:2]), points_of(request.b, block[0], block[2])
        values = values_of(request, block)
        yield block, matrix(request, block, a, b, values, memory[:count].view(size))


def matmul(request: Request, shape: Shape) -> torch.Tensor:
    """``sum_n K[l,m,n] v[l,n,c]`` as (L, M, C) in the arithmetic's dtype."""
    wide, device = accumulator(request.a.dtype), request.a.device
    size = (shape.batch, shape.m, shape.columns)
    out = torch.zeros(size, dtype=_dtype_of_sums(request, shape), device=device)
    v = request.v if request.v.dim() == 3 else request.v[None]
    for block, values in each(request, shape):
        l, m, n = block
        right = points_of(v, l, n).to(wide)
        out[l, m] += multiplied(request.descriptor.precision, values, right)
    return out.to(wide)


def total(request: Request, shape: Shape) -> torch.Tensor:
    """``sum_n K[l,m,n]`` as (L, M)."""
    out = _filled(request, shape, 0.0, _dtype_of_sums(request, shape))
    for block, values in each(request, shape):
        out[block[:2]] += values.sum(-1)
    return out.to(accumulator(request.a.dtype))


def logsumexp(request: Request, shape: Shape) -> torch.Tensor:
    """``log sum_n exp(K[l,m,n] + v[l,n])`` as (L, M), -inf for no n; v may be missing."""
    dtype = _dtype_of_sums(request, shape)
    out = _filled(request, shape, float("-inf"), dtype)
    for block, values in each(request, shape._replace(batch=shape.matrices)):
        rows = block[1]
        for l, shifted in _shifted(values, request.v, block, shape):
            out[l, rows] = torch.logaddexp(out[l, rows], shifted.logsumexp(-1).to(dtype))
    return out.to(accumulator(request.a.dtype))


def _shifted(values: torch.Tensor, v, block: Block, shape: Shape) -> Iterator:
    """A block's values plus those of v, in place, and the entries of the batch that they belong to:
    where several share one matrix, one after the other, each in memory of its own."""
    l, _, columns = block
    if v is None:
        yield l, values
    elif shape.matrices == shape.batch:
        yield l, values.add_(points_of(v, l, columns).mT)
    else:
        for i in range(shape.batch):
            one = slice(i, i + 1)
            yield one, values + points_of(v, one, columns).mT


def minimum(request: Request, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest value of each row and the first n that has it, as (L, M)."""
    out = _filled(request, shape, float("inf"))
    indices = torch.zeros(out.shape, dtype=torch.int64, device=out.device)
    for block, values in each(request, shape):
        place = values.argmin(-1)
        least = values.gather(-1, place[..., None])[..., 0]
        best, where = out[block[:2]], indices[block[:2]]
        better = (least < best) | (least.isnan() & ~best.isnan())
        out[block[:2]] = torch.where(better, least, best)
        indices[block[:2]] = torch.where(better, place + block[2].start, where)
    return out, indices


# Reductions whose arguments are no more than a request and its shape, by name.
REDUCTIONS = {"matmul": matmul, "sum": total, "logsumexp": logsumexp, "min": minimum}


def topk(
    request: Request, shape: Shape, k: int, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k smallest (or largest) values of each row in order, and their n, as (L, M, k): the first
    of equal ones."""
    size, device = (shape.batch, shape.m, k), request.a.device
    out = torch.empty(size, dtype=accumulator(request.a.dtype), device=device)
    indices = torch.empty(size, dtype=torch.int64, device=device)
    for block, values in each(request, shape, k, whole_rows=True):
        l, m, n = block
        chosen, places = first(values, min(k, values.shape[-1]), largest)
        places = places + n.start
        if n.start > 0:  # the first block has k columns or more
            chosen = torch.cat((out[l, m], chosen), -1)
            places = torch.cat((indices[l, m], places), -1)
            chosen, places = (t[..., :k] for t in _in_order(chosen, places, largest))
        out[l, m], indices[l, m] = chosen, places
    return out, indices


def first(values: torch.Tensor, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`torch.topk` with the first of equal values, where torch may return any."""
    count = values.shape[-1]
    chosen, places = values.topk(min(k + 1, count), largest=largest)
    if k < count:
        last, next_one = chosen[..., k - 1 : k], chosen[..., k:]
        chosen, places = chosen[..., :k], places[..., :k]
        # On a GPU asking would wait for it.
        if values.device.type != "cpu" or _equal(last, next_one).any():
            places = _places_to(values, last, k, largest)
    places = places.sort(-1).values
    return _in_order(values.gather(-1, places), places, largest)


def _places_to(values: torch.Tensor, last: torch.Tensor, k: int, largest: bool) -> torch.Tensor:
    """The places of the k values ahead of others, of which ``last`` is the last one, the first of
    those that equal it."""
    ahead = values > last if largest else values < last
    if largest:  # a NaN is the largest
        ahead |= values.isnan() & ~last.isnan()
    else:
        ahead |= ~values.isnan() & last.isnan()
    equal = _equal(values, last)
    rank = equal.cumsum(-1, dtype=torch.int32)
    ahead |= equal & (rank <= k - ahead.sum(-1, keepdim=True))
    count = values.shape[-1]
    everywhere = torch.arange(count, dtype=torch.int64, device=values.device)
    return everywhere.where(ahead, count).topk(k, largest=False).values


def _equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right) | (left.isnan() & right.isnan())


def _in_order(values: torch.Tensor, places: torch.Tensor, largest: bool):
    """Values and their places, sorted, equal values as they were. The NaN of all have one sign: on
    GPUs torch sorts one with the other sign as the least number."""
    values = torch.where(values.isnan(), torch.nan, values)
    values, order = values.sort(dim=-1, descending=largest, stable=True)
    return values, places.gather(-1, order)


def _filled(request: Request, shape: Shape, value: float, dtype=None) -> torch.Tensor:
    wide, device = dtype or accumulator(request.a.dtype), request.a.device
    return torch.full((shape.batch, shape.m), value, dtype=wide, device=device)


def _dtype_of_sums(request: Request, shape: Shape) -> torch.dtype:
    """In which the sums of blocks are added up: on the CPU, whose blocks are small, in float64
    where there may be many."""
    many = request.a.device.type == "cpu" and shape.n > MOST_TERMS
    return torch.float64 if many else accumulator(request.a.dtype)
