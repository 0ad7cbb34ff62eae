"""Layouts by rule: dense, causal, of windows, of blocks along the diagonal, random, the fixed ones
of sparse attention, and the best of each row.

Sizes are in elements of the matrix, and a block is stored if the rule lets it have one element.
"""

from __future__ import annotations

import torch

from kernlib.debug import takes_debug
from kernlib.descriptors.base import as_int, as_number, shown
from kernlib.families.blocksparse.contents.given import as_tensor, place_of, refuse_traced
from kernlib.families.blocksparse.contents.sizes import (
    check_positions,
    checked_block,
    checked_count,
)
from kernlib.families.blocksparse.layout import Layout

Block = int | tuple[int, int]
Device = torch.device | str | int | None
ATTENTIONS = ("unidirectional", "bidirectional")


def dense(
    rows: int, cols: int, block: Block, heads: int | None = None, device: Device = None
) -> Layout:
    """The layout that stores all blocks of a matrix (``rows``, ``cols``), sizes in elements.

    ``block`` is an int or two (rows, columns), each of 16, 32, 64 and 128; ``heads`` is how many
    matrices have it, None for one without a dimension of heads; ``device`` is where it lies,
    torch's default device for None.

    Raises TypeError for arguments of other kinds, ValueError for sizes that are no multiples of the
    block, other sizes of blocks and fewer than 1 head.

    Example:
        >>> layout = kl.blocksparse.dense(32, 64, block=16)
        >>> layout.shape, layout.nnz
        ((32, 64), 8)
    """
    grid, block = _grid(rows, cols, block, heads)
    return _made(torch.ones(grid, dtype=torch.bool, device="cpu"), block, heads, device)


def causal(length: int, block: Block, heads: int | None = None, device: Device = None) -> Layout:
    """The blocks of a matrix (``length``, ``length``) that touch its lower triangle, columns 0 to r
    of row r. Blocks are seen whole: those on the diagonal also hold columns beyond the row, so
    causal attention needs ``causal=True`` as well, and warns without.

    ``block`` is an int or two (rows, columns), each of 16, 32, 64 and 128; ``heads`` is how many
    matrices have it, None for one without a dimension of heads; ``device`` is where it lies,
    torch's default device for None.

    Raises TypeError for arguments of other kinds, ValueError for a length that is no multiple of
    the block, other sizes of blocks, and fewer than 1 head.

    Example:
        >>> kl.blocksparse.causal(48, block=16).mask().int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    return _banded(length, block, length, 0, heads, device).set_condition("causal=True")


def sliding_window(
    length: int,
    block: Block,
    window: int | tuple[int, int],
    heads: int | None = None,
    device: Device = None,
) -> Layout:
    """The blocks of a matrix (``length``, ``length``) that touch a band: columns r - left to r +
    right of row r, for a ``window`` (left, right) in elements, or one int for both. Blocks are seen
    whole, those of (window, 0) on the diagonal too: an exact band takes ``window=`` of attention.

    ``block`` is an int or two (rows, columns), each of 16, 32, 64 and 128; ``heads`` is how many
    matrices have it, None for one without a dimension of heads; ``device`` is where it lies,
    torch's default device for None.

    Raises TypeError for arguments of other kinds, ValueError for a length that is no multiple of
    the block, other sizes of blocks, sides of a window below 0 and fewer than 1 head.

    Example:
        >>> kl.blocksparse.sliding_window(64, block=16, window=(16, 0)).mask().int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise TypeError(f"window must be an int or two (left, right), got {shown(window)}")
    left, right = (checked_count("window", side, 0) for side in sides)
    layout = _banded(length, block, left, right, heads, device)
    # Of other windows whole blocks are a few columns more, and no row sees what comes behind it.
    return layout if right else layout.set_condition(f"window=({left}, 0)")


def block_diagonal(
    length: int,
    block: Block,
    size: int | None = None,
    heads: int | None = None,
    device: Device = None,
) -> Layout:
    """The blocks that touch squares of ``size`` x ``size`` elements along the diagonal of a matrix
    (``length``, ``length``); by default squares are as large as a block.

    ``block`` is an int or two (rows, columns), each of 16, 32, 64 and 128; ``heads`` is how many
    matrices have it, None for one without a dimension of heads; ``device`` is where it lies,
    torch's default device for None.

    Raises TypeError for arguments of other kinds, ValueError for a length that is no multiple of
    the block, other sizes of blocks, a size below 1 and fewer than 1 head.

    Example:
        >>> kl.blocksparse.block_diagonal(64, block=16, size=32).mask().int()
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [0, 0, 1, 1],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    grid, block = _square(length, block, heads)
    size = max(block) if size is None else checked_count("size", size, 1)
    rows, cols = (_first(count, of) for count, of in zip(grid, block, strict=True))
    row_squares = rows // size, (rows + block[0] - 1) // size
    col_squares = cols // size, (cols + block[1] - 1) // size
    # A block's rows are of squares from one to another, and so are its columns: they must meet.
    mask = row_squares[0][:, None] <= col_squares[1]
    mask &= col_squares[0] <= row_squares[1][:, None]
    return _made(mask, block, heads, device)


def random(
    rows: int,
    cols: int,
    block: Block,
    density: float,
    heads: int | None = None,
    seed: int = 0,
    device: Device = None,
) -> Layout:
    """Random blocks of a matrix (``rows``, ``cols``): for each head the number nearest to
    ``density`` times all, drawn by the int ``seed``: the same on all devices. Sizes are in
    elements, and ``density`` is from 0 to 1.

    ``block`` is an int or two (rows, columns), each of 16, 32, 64 and 128; ``heads`` is how many
    matrices have it, None for one without a dimension of heads; ``device`` is where it lies,
    torch's default device for None.

    Raises TypeError for arguments of other kinds, ValueError for sizes that are no multiples of the
    block, other sizes of blocks, a density outside of 0 to 1 and fewer than 1 head.

    Example:
        >>> layout = kl.blocksparse.random(64, 64, block=16, density=0.25, heads=2)
        >>> layout.mask().sum((1, 2))  # of 16 blocks a head
        tensor([4, 4])
    """
    grid, block = _grid(rows, cols, block, heads)
    density, seed = as_number("density", density), as_int("seed", seed)
    if not 0 <= density <= 1:
        raise ValueError(f"density must be 0 to 1, got {density}")
    generator, total = torch.Generator("cpu").manual_seed(seed % 2**64), grid[0] * grid[1]
    mask = torch.zeros(heads or 1, total, dtype=torch.bool, device="cpu")
    for line in mask:
        chosen = torch.randperm(total, generator=generator, dtype=torch.int64, device="cpu")
        line[chosen[: round(density * total)]] = True
    mask = mask.view(heads or 1, *grid)
    return _made(mask[0] if heads is None else mask, block, heads, device)


def fixed(
    length: int,
    block: int = 16,
    stride: int = 64,
    attention: str = "unidirectional",
    numverts: int = 1,
    vertsize: int = 1,
    heads: int | None = None,
    device: Device = None,
) -> Layout:
    """The fixed pattern of sparse attention, of a matrix (``length``, ``length``): with s =
    ``stride`` / ``block``,

    - rows of blocks in groups of s, each of which sees its group's columns of blocks: all of them
      if ``attention`` is "bidirectional", up to the diagonal if it is "unidirectional";
    - and columns that all rows see, "unidirectional" those up to their diagonal: ``vertsize`` from
      s - (1 + h % ``numverts``) * vertsize on, for head h, and again every s.

    ``block`` is one int of 16, 32, 64 and 128; ``heads`` is how many matrices have it, None for one
    without a dimension of heads; ``device`` is where it lies, torch's default device for None.

    Raises TypeError for arguments of other kinds, ValueError for a length that is no multiple of
    the block, other sizes of blocks, another attention, and fewer than 1 head; also unless
    ``stride`` is a multiple of ``block`` and s one of ``vertsize``, and for ``numverts`` above s /
    vertsize. Of Torch-Blocksparse, after Child et al. 2019; there, columns of unidirectional
    attention may lie behind the diagonal.

    Example:
        >>> kl.blocksparse.fixed(64, block=16, stride=32).mask().int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 1, 1, 1]], dtype=torch.int32)
    """
    block = as_int("block", block)
    heads = None if heads is None else checked_count("heads", heads, 1)
    grid, pair = _square(length, block, heads)
    if attention not in ATTENTIONS:
        names = " or ".join(map(repr, ATTENTIONS))
        raise ValueError(f"attention must be {names}, got {shown(attention)}")
    apart = _blocks("stride", checked_count("stride", stride, 1), block)
    checked_count("vertsize", vertsize, 1)
    checked_count("numverts", numverts, 1)
    if apart % vertsize:
        raise ValueError(f"stride / block = {apart} must be a multiple of vertsize = {vertsize}")
    if numverts > apart // vertsize:
        raise ValueError(
            f"numverts must be at most {apart // vertsize}, the columns of {vertsize} in a stride "
            f"of {apart} blocks, got {numverts}"
        )
    rows = torch.arange(grid[0], dtype=torch.int64, device="cpu")[:, None]
    cols = torch.arange(grid[1], dtype=torch.int64, device="cpu")
    head = torch.arange(heads or 1, dtype=torch.int64, device="cpu")[:, None, None]
    begin = apart - (1 + head % numverts) * vertsize
    vertical = (cols % apart >= begin) & (cols % apart < begin + vertsize)
    mask = (rows // apart == cols // apart) | vertical
    if attention == "unidirectional":
        mask = mask & (cols <= rows)
    return _made(mask[0] if heads is None else mask, pair, heads, device)


@takes_debug
def top_k(scores: torch.Tensor, block: Block, k: int, *, debug: bool = False) -> Layout:
    """The ``k`` blocks of each row of blocks with the highest ``scores`` (RB, CB) or (heads, RB,
    CB), one a block of sizes ``block``; of equal ones those of the lowest columns, and NaN is the
    highest. Blocks whose score is -inf are left out, so rows may have fewer. The layout lies where
    the scores do and has room for heads * RB * k blocks; scores on a GPU are not waited for.
    ``debug=True`` writes to stderr what runs.

    Raises TypeError for what is no dense tensor or nested lists of real numbers, ValueError for
    other shapes, other sizes of blocks and for k beyond CB.

    Example:
        >>> scores = torch.tensor([[0.0, 2.0, 1.0], [5.0, 3.0, 4.0]])
        >>> kl.blocksparse.top_k(scores, block=16, k=2).mask().int()
        tensor([[0, 1, 1],
                [1, 0, 1]], dtype=torch.int32)
    """
    scores = as_tensor("scores", scores, "(RB, CB) or (heads, RB, CB)").detach()
    if scores.dtype.is_complex:
        raise TypeError(f"scores must be real, got {scores.dtype}")
    if scores.dim() not in (2, 3):
        raise ValueError(
            f"scores must have shape (RB, CB) or (heads, RB, CB), got {tuple(scores.shape)}"
        )
    checked_count("k", k, 0)
    if k > scores.shape[-1]:
        raise ValueError(f"k must be at most the {scores.shape[-1]} columns of blocks, got {k}")
    if scores.is_floating_point() and scores.element_size() == 1:
        scores = scores.float()  # torch sorts no float8
    if scores.is_floating_point():  # on GPUs it sorts a NaN with a sign behind all numbers
        scores = torch.where(scores.isnan(), torch.nan, scores)
    # topk() of torch leaves open which of equal ones it takes.
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    mask = mask.scatter_(-1, best, True) & (scores != -torch.inf)
    return Layout(mask, block, scores.shape[:-1].numel() * k)


def _banded(length, block: Block, left: int, right: int, heads, device) -> Layout:
    """Blocks with an element in a column from row - left to row + right."""
    grid, block = _square(length, block, heads)
    rows, cols = (_first(count, of) for count, of in zip(grid, block, strict=True))
    mask = cols <= rows[:, None] + (block[0] - 1 + right)
    mask &= cols + (block[1] - 1) >= rows[:, None] - left
    return _made(mask, block, heads, device)


def _first(count: int, size: int) -> torch.Tensor:
    """The first row or column of each block."""
    return torch.arange(count, dtype=torch.int64, device="cpu") * size


def _square(length: object, block: Block, heads: object) -> tuple[tuple, tuple]:
    """The grid of a matrix (length, length), and rows and columns of a block."""
    return _grid(length, length, block, heads, ("length", "length"))


def _grid(
    rows: object, cols: object, block: Block, heads: object, names: tuple = ("rows", "cols")
) -> tuple[tuple, tuple]:
    """The grid, and rows and columns of a block. Raises what this module says."""
    sizes = checked_block(block)
    pairs = zip(names, (rows, cols), sizes, strict=True)
    grid = tuple(_blocks(name, checked_count(name, size, 0), of) for name, size, of in pairs)
    if heads is not None:
        checked_count("heads", heads, 1)
    check_positions(grid, heads)
    return grid, sizes


def _blocks(name: str, size: int, block: int) -> int:
    if size % block:
        raise ValueError(
            f"{name} must be a multiple of the block's {block}, got {size}; the next one is "
            f"{size + block - size % block}"
        )
    return size // block


def _made(mask: torch.Tensor, block: tuple[int, int], heads: int | None, device: Device) -> Layout:
    refuse_traced("this function of kernlib.blocksparse")
    if heads is not None and mask.dim() == 2:
        mask = mask.expand(heads, *mask.shape)
    return Layout(mask, block, device=place_of(device, None))
