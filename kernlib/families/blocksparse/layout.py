"""Which blocks of a matrix are stored: :class:`Layout`, for block-sparse products and softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from weakref import WeakKeyDictionary

import torch
from torch.compiler import is_dynamo_compiling

from kernlib import run
from kernlib.descriptors.base import check_flag
from kernlib.families.blocksparse.contents import bits, host, matrices, writing
from kernlib.families.blocksparse.contents.given import (
    Indices,
    Mask,
    check_device,
    check_source,
    checked_device,
    checked_indices,
    checked_mask,
    has_values,
    outside,
    place_of,
    refuse_traced,
)
from kernlib.families.blocksparse.contents.sizes import (
    DROPPED,
    NAMES,
    SIZES,
    blocks_of,
    check_positions,
    checked_block,
    checked_count,
    checked_grid,
    count_of,
    form_text,
    is_form,
    layout_text,
    parse_form,
    parse_layout,
    sizes_shape,
    tensor_shapes,
)
from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.runtime.tensors import check_dense

__all__ = ("NAMES", "Layout", "count_of", "parse_layout")

# Copies that were pickled for a process that is being started: they are passed as files of shared
# memory, which close with the last tensor here that is on them.
_sent: WeakKeyDictionary[object, list] = WeakKeyDictionary()


class Layout:
    """Which blocks of a matrix (R, C), or of one matrix a head, are stored. Sizes and capacity are
    fixed, contents change by :meth:`update_`. Only what says so and copies to CPUs wait for GPUs.

    - ``mask``: (RB, CB), or (heads, RB, CB), of bools or ints, or nested lists of them: where it is
      not 0 the block is stored, and then R = RB * rows of a block, C = CB * columns of a block.
    - ``block``: rows and columns of a block, or one int for both, each of 16, 32, 64 and 128.
    - ``capacity``: room for so many blocks, by default the mask's, which waits for one on a GPU.
    - ``device``: where the layout lies, by default where the mask does.

    Values of a layout are a tensor (..., capacity, rows of a block, columns of a block), the blocks
    in the order of ``mask.nonzero()``: by head, row and column. Raises TypeError and ValueError for
    arguments that are none of these, and ValueError for contents on the CPU with more blocks than
    ``capacity``; of those on a GPU the last ones are dropped, which :meth:`check` finds. Layouts
    and the order of values follow Torch-Blocksparse.

    Copies, pickles and ``torch.save`` hold the contents; ``torch.load`` checks them once this class
    is imported. ``condition`` is what attention must be told too, such as "causal=True", if its
    blocks hold more than their rule; else, and of copies and later contents, None.

    Example:
        >>> layout = kl.blocksparse.Layout([[1, 0], [1, 1]], block=16)
        >>> layout.shape, layout.grid, layout.block, layout.heads, layout.nnz, layout.density
        ((32, 32), (2, 2), (16, 16), None, 3, 0.75)
        >>> layout.row_starts.tolist(), layout.col_starts.tolist(), layout.col_order.tolist()
        ([0, 1, 3], [0, 2, 3], [0, 1, 2])
        >>> bsr = layout.to_dense(layout.to_blocks(torch.ones(32, 32))).to_sparse_bsr((16, 16))
        >>> layout.from_bsr(bsr)[0].transpose().mask().tolist(), layout.capacity
        ([[True, True], [False, True]], 3)
        >>> layout.update_([[0, 1], [0, 0]]).from_state(*layout.state()).check()  # nothing dropped
        >>> layout.from_indices([0], [1], (2, 2), 16).update_indices_([1], [0]).check()
        >>> layout = layout.cuda() if torch.cuda.is_available() else layout.to(layout.cpu().device)
        >>> layout.from_layout(layout.text, layout.tensors).key == layout.set_condition(None).key
        True
        >>> layout.form, len(layout.flat), len(layout.addresses), layout.sizes.rows, layout.nbytes
        ('16x16 blocks', 7, 6, 16, 64)
        >>> layout.write_([[1, 0], [0, 0]]).keep_for("BlockSparseLinear")  # which writes by write_
    """

    __slots__ = (
        "__weakref__", "_addresses", "_block", "_capacity", "_device", "_flat", "_form", "_grid",
        "_heads", "_identity", "_keeper", "_mask", "_tensors", "_text", "condition",
    )  # fmt: skip

    def __init__(
        self,
        mask: Mask,
        block: int | tuple[int, int],
        capacity: int | None = None,
        device: torch.device | str | int | None = None,
    ):
        if is_dynamo_compiling():
            _trace(self, mask, block, capacity, device)
            return
        block = checked_block(block)
        place, mask = place_of(device, mask), checked_mask(mask)
        heads = mask.shape[0] if mask.dim() == 3 else None
        grid = tuple(mask.shape[-2:])
        check_positions(grid, heads)
        with outside():
            count = writing.count_live(mask) if capacity is None else capacity
            count = checked_count("capacity", count, 0)
            blocks = blocks_of(block, grid, heads, count)
            tensors = writing.of_mask(_with_heads(mask), blocks, host.source(mask, place))
            _fill(self, layout_text(block, grid, heads, count), tuple(t.to(place) for t in tensors))
            _note_mask(self, mask)
        _mark(self)
        host.note(self, tensors)

    @classmethod
    def from_indices(
        cls,
        rows: Indices,
        cols: Indices,
        grid: tuple[int, int],
        block: int | tuple[int, int],
        heads: Indices | None = None,
        n_heads: int | None = None,
        capacity: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> Layout:
        """The layout of a ``grid`` of (RB, CB) blocks that stores those of ``rows`` and ``cols``,
        lists or tensors (blocks,) of ints in any order, and of ``n_heads`` heads those of
        ``heads``. The capacity is their number by default. Raises TypeError and ValueError as the
        class does, and for indices on the CPU that are out of range or there twice; a GPU drops
        these."""
        refuse_traced("Layout.from_indices")
        block, grid = checked_block(block), checked_grid(grid)
        lists = checked_indices(rows, cols, heads)
        if (heads is None) != (n_heads is None):
            missing = "heads" if heads is None else "n_heads"
            raise ValueError(f"heads and n_heads must be given together, got no {missing}")
        if n_heads is not None:
            n_heads = checked_count("n_heads", n_heads, 1)
        check_positions(grid, n_heads)
        count = lists["rows"].shape[0] if capacity is None else capacity
        count = checked_count("capacity", count, 0)
        place = place_of(device, rows)
        with outside():
            blocks = blocks_of(block, grid, n_heads, count)
            tensors = writing.of_indices(lists, blocks, place)
        layout = _marked(layout_text(block, grid, n_heads, count), tensors)
        if place.type == "meta" and has_values(*lists.values()):
            there = cls.from_indices(rows, cols, grid, block, heads, n_heads, count, "cpu")
            _note_mask(layout, there.mask())
        return layout

    @classmethod
    def from_bsr(cls, bsr: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """The layout of a matrix ``bsr`` of torch's layout ``torch.sparse_bsr``, and its values in
        the layout's order, of which the gradient is recorded. Columns may stand in any order in a
        row. Waits for the device. Raises TypeError for other tensors, ValueError for batches, for
        sizes of blocks that no kernel takes and for a block that stands there twice."""
        from kernlib.families.blocksparse import imports  # only this needs it

        refuse_traced("Layout.from_bsr")
        blocks = imports.read_bsr(bsr)
        layout = cls.from_indices(blocks.rows, blocks.cols, blocks.grid, blocks.block)
        if layout.device.type == "cuda":
            layout.check()
        return layout, blocks.values

    @classmethod
    def from_block_mask(cls, block_mask: object, capacity: int | None = None) -> Layout:
        """The layout of ``block_mask``, a ``torch.nn.attention.flex_attention.BlockMask``: its full
        and its partial blocks, whole whatever ``mask_mod`` says. Heads are the mask's, or none
        where it has one for all. Waits for the device without ``capacity``, and for a batch. Raises
        TypeError for another type, ValueError for other sizes of blocks and differing batches.

        Example:
            >>> from torch.nn.attention.flex_attention import BlockMask
            >>> mask = BlockMask.from_kv_blocks(torch.tensor([[[2]]]), torch.tensor([[[[0, 1]]]]))
            >>> kl.blocksparse.Layout.from_block_mask(mask).shape
            (128, 256)
        """
        from kernlib.families.blocksparse import imports

        refuse_traced("Layout.from_block_mask")
        mask, block = imports.read_block_mask(block_mask)
        new = cls(mask, block, capacity)
        return new.set_condition(imports.condition_of(block_mask)) if capacity is None else new

    @classmethod
    def from_state(
        cls, header: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
    ) -> Layout:
        """The layout whose :meth:`state` is ``header`` and ``tensors``, on their device, sharing
        none. Waits for the device: everything is made anew of the stored bits and compared, so that
        no kernel can leave its memory, whatever bytes they hold. Raises ValueError that names what
        is missing, unknown, damaged or wrong, TypeError for what is no dict or tensor."""
        from kernlib.families.blocksparse import saved

        with outside():
            text, loaded = saved.loaded(header, tensors)
        return _marked(text, loaded)

    @classmethod
    def from_layout(cls, text: str, tensors: Sequence[torch.Tensor]) -> Layout:
        """The layout of a :attr:`text` and its ``tensors`` in order, or of a :attr:`form` and its
        :attr:`flat` tensors, unchecked: in 2 us."""
        layout = cls.__new__(cls)
        if is_form(text):
            _fill_flat(layout, text, tuple(tensors))
        else:
            _fill(layout, text, tuple(tensors))
        return layout

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self._block

    @property
    def grid(self) -> tuple[int, int]:
        """``(RB, CB)``: blocks in a column and in a row of the matrix."""
        if is_dynamo_compiling() and self._flat is not None:  # where numbers are constants
            return self._flat[SIZES].shape[1] - 2, self._flat[SIZES].shape[2] - 2
        return self._grid

    @property
    def heads(self) -> int | None:
        """How many matrices there are, None for one without a dimension of heads."""
        return self._heads

    @property
    def shape(self) -> tuple[int, int]:
        """``(R, C)`` of the matrix, or of each head's."""
        (rows, cols), (height, width) = self.grid, self._block
        return rows * height, cols * width

    @property
    def capacity(self) -> int:
        """For how many blocks, of all heads, there is room."""
        if is_dynamo_compiling() and self._flat is not None:
            return self._flat[3].shape[0]
        return self._capacity

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._device

    @property
    def text(self) -> str:
        """All but the contents: ``64x64 blocks, 8x16 grid, 4 heads, capacity 300``."""
        if self._text is None:
            text = layout_text(self._block, self._grid, self._heads, self._capacity)
            object.__setattr__(self, "_text", text)
        return self._text

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The contents, in the order of ``NAMES``. They never move: :meth:`update_` writes them."""
        if self._tensors is None:
            shapes = zip(self._flat, tensor_shapes(self.sizes), strict=False)
            object.__setattr__(self, "_tensors", tuple(t.view(shape) for t, shape in shapes))
        return self._tensors

    @property
    def form(self) -> str:
        """What operators of torch.library take as text: all that is no size, ``64x64 blocks`` or
        ``64x64 blocks of heads``; the whole :attr:`text` of a layout without :attr:`flat`."""
        return self._form

    @property
    def flat(self) -> tuple[torch.Tensor, ...]:
        """What operators take as tensors: the contents, each of one dimension, and behind them an
        empty tensor whose shape (heads + 2, RB + 2, CB + 2, 0) says the sizes, which to
        torch.compile are symbols. The :attr:`tensors` of a layout that was made of others'."""
        return self._tensors if self._flat is None else self._flat

    @property
    def key(self) -> tuple:
        """Text and device: what plans of products depend on."""
        if self._identity is None:
            object.__setattr__(self, "_identity", (self.text, self._device))
        return self._identity

    def set_condition(self, condition: str) -> Layout:
        """Set the ``condition`` of this layout, which it returns."""
        object.__setattr__(self, "condition", condition)
        return self

    @property
    def addresses(self) -> list[int]:
        """The tensors' addresses, looked up once."""
        if self._addresses is None:
            contents = (self._flat or self._tensors)[: len(NAMES)]
            object.__setattr__(self, "_addresses", [t.data_ptr() for t in contents])
        return self._addresses

    @property
    def sizes(self) -> Blocks:
        """What lowering knows of the layout."""
        return blocks_of(self._block, self._grid, self._heads, self._capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def nnz(self) -> int:
        """How many blocks are stored. Waits for the device."""
        return writing.counted(self.tensors)[0]

    @property
    def density(self) -> float:
        """The part of all blocks that is stored, 0 if there are none. Waits for the device."""
        total = self._grid[0] * self._grid[1] * (self._heads or 1)
        return self.nnz / total if total else 0.0

    def mask(self) -> torch.Tensor:
        """Which blocks are stored: bools (RB, CB) or (heads, RB, CB)."""
        mask = bits.unpack(self.tensors[0], self._grid[1])
        return mask.view(self._grid if self._heads is None else (self._heads, *self._grid))

    def update_(self, mask: Mask) -> Layout:
        """Store the blocks of another ``mask`` of the same shape from now on, and return the
        layout. A mask on the layout's GPU is read there, also while a CUDA graph is captured; one
        on the CPU is copied. Products whose gradients are still to be computed raise torch's
        RuntimeError for tensors that were written in between. Raises TypeError and ValueError as
        the class does, CaptureError where the kernels are not loaded yet while a graph is captured:
        update once before; RuntimeError for the layout of a layer, whose own ``update_`` moves the
        values along. It ends what ``torch.compile`` makes one program of."""
        self._begin_update()
        return self.write_(mask)

    def write_(self, mask: Mask) -> Layout:
        """:meth:`update_` for the owner of a layout, which moves the values along."""
        index = "0, 0" if self._heads is None else "0"
        mask = checked_mask(mask, f"block_mask.to_dense()[{index}] has its blocks")
        expected = self._grid if self._heads is None else (self._heads, *self._grid)
        if tuple(mask.shape) != expected:
            raise ValueError(
                f"mask must have the layout's shape {expected}, got {tuple(mask.shape)}; for "
                "another make another Layout"
            )
        check_source("mask", mask, self._device)
        with outside():
            writing.update_mask(self.tensors, _with_heads(mask), self.sizes)
        object.__setattr__(self, "_mask", None)
        return self

    def update_indices_(self, rows: Indices, cols: Indices, heads: Indices | None = None) -> Layout:
        """:meth:`update_` by the ``rows`` and ``cols`` of blocks, and by their ``heads`` where the
        layout has some. Raises what that and :meth:`from_indices` do."""
        self._begin_update()
        if (heads is None) != (self._heads is None):
            count = "no heads" if self._heads is None else f"{self._heads} heads"
            raise ValueError(f"heads must be given where the layout has some; this has {count}")
        lists = checked_indices(rows, cols, heads)
        check_source("rows", lists["rows"], self._device)
        with outside():
            writing.update_indices(self.tensors, lists, self.sizes)
        object.__setattr__(self, "_mask", None)
        return self

    def keep_for(self, keeper: str) -> None:
        """Refuse :meth:`update_` from now on, which would leave the values of ``keeper`` behind."""
        object.__setattr__(self, "_keeper", keeper)

    def _begin_update(self) -> None:
        if is_dynamo_compiling():
            raise RuntimeError(
                "update_ does not work inside of a function for torch.compile: call it between the "
                "calls of that function, which sees what was written"
            )
        if self._keeper is not None:
            raise RuntimeError(
                f"the layout is that of a {self._keeper}, whose values would stay where they are: "
                "call the update_ of that, drop_ or regrow_"
            )
        object.__setattr__(self, "condition", None)

    def check(self) -> None:
        """Raise ValueError if the last write of contents dropped blocks. Waits for the device."""
        live, *dropped = writing.counted(self.tensors)
        reasons = [f"{n} {why}" for n, why in zip(dropped, DROPPED, strict=True) if n]
        if reasons:
            raise ValueError(
                f"blocks were dropped ({', '.join(reasons)}), {live} are stored: the layout has a "
                f"capacity of {self._capacity}, and a grid of {self._grid[0]} x {self._grid[1]}"
            )

    def to_dense(self, values: torch.Tensor) -> torch.Tensor:
        """The matrices (..., R, C), or (..., heads, R, C), of ``values``: 0 where no block is
        stored. Its gradient is recorded. Raises TypeError and ValueError for other values."""
        check_dense(("values",), values=values)
        matrices.check_values(values, self.sizes)
        check_device("values", values, self._device)
        dense = matrices.to_dense(values, self.sizes, self.tensors)
        return dense.squeeze(-3) if self._heads is None else dense

    def to_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """The values (..., capacity, rows, columns of a block) of matrices ``dense`` (..., R, C),
        or (..., heads, R, C), which may be one for all heads: 0 in slots behind the stored blocks.
        Its gradient is recorded. Raises TypeError and ValueError for other matrices."""
        check_dense(("dense",), dense=dense)
        check_device("dense", dense, self._device)
        dense = matrices.with_heads(dense, self.sizes, self._heads)
        return matrices.to_blocks(dense, self.sizes, self.tensors)

    def transpose(self) -> Layout:
        """The layout of the transposed matrix, of blocks (columns, rows), sharing nothing with this
        one. Its values are :attr:`col_order` of these, each block transposed."""
        turned = Layout(self.mask().mT, self._block[::-1], self._capacity, self._device)
        with outside():
            turned.tensors[5].copy_(self.tensors[5])  # what was dropped here is missing there
        return turned

    @property
    def row_starts(self) -> torch.Tensor:
        """The first slot of each row of blocks, then the count: int32 (heads * RB + 1,)."""
        return matrices.row_starts(self.sizes, self.tensors)

    @property
    def col_starts(self) -> torch.Tensor:
        """Where columns begin in :attr:`col_order`, then the count: int32 (heads * CB + 1,)."""
        return matrices.col_starts(self.sizes, self.tensors)

    @property
    def col_order(self) -> torch.Tensor:
        """The slots by head, column and row, those without a block last: int32 (capacity,)."""
        return matrices.col_order(self.sizes, self.tensors)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Layout:
        """The layout on a ``device``: itself if it is there, else a copy, ``non_blocking`` or not;
        of one made on meta by its mask. Raises TypeError and ValueError for no device."""
        place = checked_device(device)
        check_flag("non_blocking", non_blocking)
        if place == self._device:
            return self
        if self._device.type == "meta":
            if self._mask is None:
                raise ValueError("a layout on meta has no contents to copy: make it of its mask")
            return Layout(self._mask, self._block, self._capacity, place)
        with outside():
            moved = tuple(t.to(place, non_blocking=non_blocking) for t in self.tensors)
        return _marked(self.text, moved)

    def cuda(self, device: torch.device | int | None = None) -> Layout:
        """:meth:`to` a CUDA ``device``, the current one by default."""
        return self.to("cuda" if device is None else torch.device("cuda", device))

    def cpu(self) -> Layout:
        """:meth:`to` the CPU."""
        return self.to("cpu")

    def state(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """Plain values, and copies of the tensors by name: what :meth:`from_state` takes. Waits for
        the device, for a checksum."""
        from kernlib.families.blocksparse import saved

        copies = {name: t.clone() for name, t in writing.named(self.tensors).items()}
        return saved.header_of(self.text, copies), copies

    def __repr__(self) -> str:
        return f"Layout({self.text}, device='{self._device}')"

    def __setattr__(self, name: str, value) -> None:
        raise AttributeError(
            f"the sizes of a Layout do not change: {name} cannot be set; contents change by update_"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"the sizes of a Layout do not change: {name} cannot be deleted")

    def __copy__(self) -> Layout:
        return _copied(self, Layout.from_layout(self.form, self.flat))

    def __deepcopy__(self, memo: dict) -> Layout:
        with outside():
            layout = _copied(self, _marked(self.text, tuple(t.clone() for t in self.tensors)))
        memo[id(self)] = layout
        return layout

    def __reduce__(self):
        state = self.state()
        process = get_spawning_popen()
        if process is not None:
            _sent.setdefault(process, []).append(state[1])
        return _unpickled, state


def _fill(made: Layout, text: str, tensors: tuple[torch.Tensor, ...]) -> None:
    """The fields of a new layout of the tensors in its text's shapes."""
    _put(made, text, parse_layout(text), tensors[0].device, tensors, None, text)


def _fill_flat(layout: Layout, form: str, flat: tuple[torch.Tensor, ...]) -> None:
    """Fill a layout from an operator's arguments; sizes may be symbols."""
    block, has_heads = parse_form(form)
    heads, rows, cols, _ = flat[SIZES].shape
    sizes = block, (rows - 2, cols - 2), heads - 2 if has_heads else None, flat[3].shape[0]
    _put(layout, layout_text(*sizes), sizes, flat[SIZES].device, None, flat, form)


def _trace(layout: Layout, mask: Mask, block: object, capacity: int | None, device: object) -> None:
    """The fields of a layout that is made inside of a compiled function, by an operator."""
    if capacity is None:
        raise ValueError(
            "capacity must be given where a layout is made inside of a function for torch.compile, "
            "which cannot count the blocks of mask there: pass one that is large enough, such as "
            "the number of all blocks, or make the layout outside and pass it in"
        )
    rows, cols = checked_block(block)
    if not isinstance(mask, torch.Tensor):
        mask = torch.as_tensor(mask, dtype=None, device="cpu" if device is None else device)
    elif device is not None:
        mask = mask.to(device)
    flat = run.blocksparse_operators.layout_tensors(mask, rows, cols, capacity)
    heads, grid_rows, grid_cols, _ = flat[SIZES].shape
    has_heads = mask.dim() == 3
    grid = grid_rows - 2, grid_cols - 2
    sizes = (rows, cols), grid, heads - 2 if has_heads else None, capacity
    _put(layout, None, sizes, flat[SIZES].device, None, flat, form_text((rows, cols), has_heads))


def _put(
    layout: Layout, text, sizes: tuple, device: torch.device, tensors, flat, form: str
) -> None:
    """The fields of a new layout, which refuses to have them set."""
    put = object.__setattr__
    block, grid, heads, capacity = sizes
    put(layout, "_tensors", tensors)
    put(layout, "_flat", flat)
    put(layout, "_form", form)
    put(layout, "_text", text)
    put(layout, "_block", block)
    put(layout, "_grid", grid)
    put(layout, "_heads", heads)
    put(layout, "_capacity", capacity)
    put(layout, "_device", device)
    put(layout, "_identity", None if text is None else (text, device))
    for name in ("_addresses", "condition", "_keeper", "_mask"):
        put(layout, name, None)


def _note_mask(layout: Layout, mask: torch.Tensor) -> None:
    """Have a layout on meta, which holds no contents, know them for when it is moved."""
    if layout.device.type == "meta":
        object.__setattr__(layout, "_mask", mask.to("cpu", copy=True) if has_values(mask) else None)


def _copied(layout: Layout, other: Layout) -> Layout:
    object.__setattr__(other, "_mask", layout._mask)
    host.copy(layout, other)
    return other


def _mark(layout: Layout) -> None:
    """Have the tensors be views of flat ones, which compiled code is given, and mark these as by
    ``torch._dynamo.mark_static_address``, which would load Dynamo: CUDA graphs of compiled code
    read a layout where it is, and see what was written there since."""
    tensors = layout._tensors
    with outside():
        flat = [writing.flat(t) for t in tensors]
        pairs = zip(flat, tensors, strict=True)
        shaped = tuple(t if t.dim() == like.dim() else t.view(like.shape) for t, like in pairs)
        flat.append(tensors[0].new_empty(sizes_shape(layout._grid, layout._heads)))
    for t in (*shaped, *flat):
        t._dynamo_static_input_type = "unguarded"
    flat[5]._dynamo_static_indices = {0}  # as by mark_static: of one size in all layouts
    put = object.__setattr__
    put(layout, "_tensors", shaped)
    put(layout, "_flat", tuple(flat))
    put(layout, "_form", form_text(layout._block, layout._heads is not None))


def _marked(text: str, tensors: tuple[torch.Tensor, ...]) -> Layout:
    layout = Layout.from_layout(text, tensors)
    _mark(layout)
    return layout


def _with_heads(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dim() == 3 else mask.unsqueeze(0)


def _unpickled(header: dict, tensors: dict) -> Layout:
    return Layout.from_state(header, tensors)


torch.serialization.add_safe_globals([_unpickled])  # checks all arguments
