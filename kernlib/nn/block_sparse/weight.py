"""What layers with a trainable block-sparse weight share: they change in place which blocks are
stored. :mod:`kernlib.nn.block_sparse.holding` has what holds, moves and saves the layout."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import check_flag, shown
from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.contents.given import Mask, place_of
from kernlib.families.blocksparse.contents.sizes import checked_block, checked_count
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.sparse.prune import check_density, check_per
from kernlib.nn.block_sparse import growth
from kernlib.nn.block_sparse.holding import LayoutModule
from kernlib.nn.kronecker_sparse_algorithms import autocasts
from kernlib.runtime.dtypes import FLOAT_TYPES, accumulator
from kernlib.runtime.tensors import check_dense

if TYPE_CHECKING:
    from typing_extensions import Self

FEATURES = ("out_features", "in_features")  # rows and columns of a weight


class BlockSparseModule(LayoutModule):
    """A layer whose ``weight`` (capacity, block rows, block columns) holds the stored blocks of a
    matrix, in the order of its :attr:`layout`."""

    def __init__(self, layout: Layout, dtype: torch.dtype | None, density: float | None = None):
        dtype = checked_dtype(dtype)
        super().__init__(layout)
        shape = layout.capacity, *layout.block
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=layout.device))
        self._density = density  # of blocks to draw; None if they are not to be drawn
        self._candidates: Layout | None = None  # that are watched

    @property
    def layout(self) -> Layout:
        """Which blocks are stored. To change them call :meth:`update_`, :meth:`drop_` or
        :meth:`regrow_` of the layer, which take the values along; its own is refused."""
        if self._blank:
            self._adopt()
        return self._layout if self._blank else self._here()

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self._layout.block

    # Changing which blocks are stored.

    @torch.no_grad()
    def update_(self, mask: Mask, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Store the blocks of another mask from now on, in place, and return the layer: those that
        were stored keep their values, their gradient, and in ``optimizer`` their state; others
        start at 0.

        - ``mask``: as that of :meth:`kernlib.blocksparse.Layout.update_`, which says when too many
          blocks raise and when they are dropped, and which does not wait for a GPU.
        - ``optimizer``: one of torch.optim that has the weight, or None.

        What others hold of the weight does not move, such as an average in
        ``torch.optim.swa_utils.AveragedModel``: :meth:`remap` moves it. Raises TypeError for what
        is no optimizer, ValueError for one of other parameters, RuntimeError for a weight that is
        parametrized or pruned.

        Example:
            >>> layer = kl.nn.BlockSparseLinear(64, 32, 16, density=0.5)
            >>> before = layer.weight.detach().clone()
            >>> layer = layer.update_(torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0]]))
            >>> layer.block, layer.layout.density, torch.equal(layer.remap(before), layer.weight)
            ((16, 16), 0.5, True)
        """
        self._check_change(optimizer)
        before = growth.places(self._editable())
        self._rewrite(mask)
        self._source = growth.sources(before, self._layout)
        tensors = [self.weight, self.weight.grad]
        if optimizer is not None:
            tensors += optimizer.state.get(self.weight, {}).values()
        for tensor in tensors:
            if self._is_by_slots(tensor):
                tensor.copy_(growth.moved(tensor, self._source))
        return self

    def _check_change(self, optimizer) -> None:
        """Raises RuntimeError where a change of the blocks would not last, TypeError and ValueError
        for another optimizer than the weight's."""
        if not self.persistent:
            raise RuntimeError(
                f"the blocks of {type(self).__name__} do not change, as its state_dict, like "
                "Torch-Blocksparse's, does not hold them: use the layers of kernlib.nn"
            )
        weight = self._parameters.get("weight")
        if weight is None:
            raise RuntimeError(
                "weight is computed of other tensors, by a parametrization or by pruning, in which "
                "no block can be moved: take that off before the blocks change"
            )
        if optimizer is None:
            return
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be one of torch.optim, got {shown(optimizer)}")
        if not any(p is weight for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("optimizer must be one that has the layer's weight, got another")

    def _is_by_slots(self, value: object) -> bool:
        """Whether it has a part for each slot: a moment of the weight's shape, or what Adafactor
        keeps of the rows and of the columns of each."""
        weight = self.weight
        return isinstance(value, torch.Tensor) and value.dim() == 3 and len(value) == len(weight)

    def drop_(
        self,
        count: int | None = None,
        density: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Self:
        """Drop the ``count`` stored blocks of smallest Frobenius norm, or so many that a part
        ``density`` of all blocks of the matrix stays, in place, as :meth:`update_` does, and return
        the layer. ``optimizer`` is as that of :meth:`update_`. Nothing waits for a GPU.

        Raises TypeError and ValueError unless one of the two is given and right.
        """
        if (count is None) == (density is None):
            raise ValueError(
                f"give count or density, one of them; got {shown(count)} and {density!r}"
            )
        if count is None:
            check_density(density)
            remaining = round(density * growth.total(self._layout))
        else:
            remaining = self._editable().tensors[5][0] - checked_count("count", count, 0)
        norms = growth.squares(self.weight)
        return self.update_(growth.without_smallest(self._editable(), norms, remaining), optimizer)

    def watch_growth(self, watch: bool = True, candidates: Layout | None = None) -> Self:
        """From now on let each backward pass also compute the gradient by all blocks of
        ``candidates``, a Layout of the same blocks and grid, or None for all there are, and add it
        to :attr:`growth_gradient`; return the layer. It is one "sdd" more, of the input and the
        gradient of the output, and takes the activation as a step of its own. ``watch=False``
        ends it and lets the gradient go.

        Where several processes train copies, reduce ``growth_gradient`` over them before
        :meth:`regrow_`, as the parameters' gradients are: else they grow apart. Raises TypeError
        and ValueError for other arguments.
        """
        check_flag("watch", watch)
        self._growth = None
        if not watch:
            self._candidates = None
            return self
        mine = self._editable()
        if candidates is None:
            mask = torch.ones(mine.grid, dtype=torch.bool, device=mine.device)
            candidates = Layout(mask, mine.block, growth.total(mine))
        check_layout("candidates", candidates, mine.shape)
        if candidates.block != mine.block:
            raise ValueError(f"candidates must have blocks {mine.block}, got {candidates.block}")
        self._candidates = candidates.to(mine.device)
        return self

    @property
    def growth_candidates(self) -> Layout | None:
        """The watched blocks, None without them."""
        return self._candidates

    @property
    def growth_gradient(self) -> torch.Tensor | None:
        """The gradient by the watched blocks, summed over backward passes since :meth:`regrow_` or
        :meth:`watch_growth`: values of :attr:`growth_candidates`, float32 for half types. None
        before the first pass."""
        return self._growth

    def regrow_(
        self, count: int | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> Self:
        """Store ``count`` more blocks, those that are watched and not stored whose gradient has the
        largest Frobenius norm; their values begin at 0. It happens in place, as :meth:`update_`
        does, and returns the layer. There are never more than the layout's capacity has room for;
        None takes that many. ``optimizer`` is as that of :meth:`update_`. Begins a new
        :attr:`growth_gradient`. Nothing waits for a GPU.

        With :meth:`drop_` this is a step of RigL: Evci, Gale, Menick, Castro and Elsen, "Rigging
        the Lottery: Making All Tickets Winners" (2020).

        Raises RuntimeError if no gradient was computed since :meth:`watch_growth`, TypeError and
        ValueError for other counts.

        Example:
            >>> layer = kl.nn.BlockSparseLinear(64, 64, 16, density=0.5).watch_growth()
            >>> layer(torch.randn(8, 64)).sum().backward()
            >>> layer.growth_gradient.shape, layer.growth_candidates.density
            (torch.Size([16, 16, 16]), 1.0)
            >>> layer.drop_(2).regrow_(2).layout.density
            0.5
        """
        layout = self._editable()
        count = layout.capacity if count is None else checked_count("count", count, 0)
        if self._growth is None:
            raise RuntimeError(
                "there is no gradient by blocks that are not stored: call watch_growth() before "
                "the forward and backward pass"
            )
        norms = growth.squares(self._growth)
        mask = growth.with_largest(layout, self._candidates, norms, count)
        self._growth = None
        return self.update_(mask, optimizer)

    def remap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values (capacity, block rows, block columns) of the layout before the last change,
        such as a copy of the weight or the moments of an optimizer that was not handed over, as
        those of the layout now: a new tensor, 0 in slots of new blocks. Raises TypeError and
        ValueError for what are no such values."""
        check_dense(("tensor",), tensor=tensor)
        if tensor.shape != self.weight.shape:
            raise ValueError(
                f"tensor must have the weight's shape {tuple(self.weight.shape)}, got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.device != self.weight.device:
            raise ValueError(f"tensor must be on {self.weight.device}, got {tensor.device}")
        return tensor.clone() if self._source is None else growth.moved(tensor, self._source)

    def _watch(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A product of x, whose gradient is to be seen. Raises RuntimeError when compiled, and
        inside of transforms."""
        if is_dynamo_compiling():
            raise RuntimeError(
                "watch_growth sees gradients of eager calls: call watch_growth(False) before "
                "torch.compile, or leave the layer out of it"
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "watch_growth sees gradients of eager calls, and none inside a transform of "
                "torch.func: call watch_growth(False) before"
            )
        return growth.Watched.apply(y, x, self._record) if y.requires_grad else y

    def _record(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        if self._candidates is None:  # no longer
            return
        by_blocks = self._candidate_gradient(grad, x.to(grad.dtype), self._candidates)
        if self._growth is None:
            self._growth = by_blocks.to(accumulator(by_blocks.dtype))
        else:
            self._growth.add_(by_blocks)

    def _candidate_gradient(self, grad, x, candidates: Layout) -> torch.Tensor:
        raise NotImplementedError

    # Which blocks there are at all.

    def _move(self, layout: Layout, place: torch.device) -> None:
        super()._move(layout, place)
        if self._candidates is not None:
            self.watch_growth(True, placed(self._candidates, place))

    def _drawn(self) -> Layout:
        """The layout of a weight that is to be drawn: of a layer that comes from meta its blocks
        are, if it was made with a density."""
        if self._blank:
            self._adopt()
        if self._blank and self._density is not None:
            current = self._layout
            self._rewrite(drawn(current.shape, current.block, self._density))
        return self._layout if self._blank else self._here()


def layout_for(
    layout: Layout | int | tuple[int, int],
    shape: tuple[int, int],
    density: float | None,
    capacity: int | None,
    device: torch.device | str | int | None,
    names: tuple[str, str] = FEATURES,
) -> Layout:
    """A layout of its own for a matrix of a shape: a copy of one that is given, or one of blocks of
    a given size, drawn with the seed that torch's generator of the CPU makes. Raises TypeError and
    ValueError."""
    if isinstance(layout, Layout):
        if density is not None or capacity is not None:
            raise ValueError("density and capacity go with a block; a Layout has its own")
        check_layout("layout", layout, shape)
        place = layout.device if device is None else place_of(device, None)
        moved = layout.to(place)
        return copy.deepcopy(layout) if moved is layout else moved
    if isinstance(layout, torch.Tensor):
        raise TypeError(
            "layout must be a kernlib.blocksparse.Layout or the size of blocks, got a tensor; "
            "Layout(mask, block) makes one of a mask"
        )
    block = checked_block(layout)
    if density is None:
        raise ValueError("density must be given with a block: the part of all blocks to store")
    check_density(density)
    check_multiple(shape, block, names)
    return Layout(drawn(shape, block, density), block, capacity, place_of(device, None))


def drawn(shape: tuple[int, int], block: tuple[int, int], density: float) -> torch.Tensor:
    """The mask of a part of all blocks, drawn with a seed of torch's generator of the CPU."""
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return builders.random(*shape, block, density, seed=seed, device="cpu").mask()


def layout_of_weight(
    weight: torch.Tensor, block, density: float, criterion: str, per: str, capacity: int | None
) -> Layout:
    """The layout of the blocks of a matrix that stay, where it lies, on meta without contents; see
    :func:`kernlib.nn.block_sparse.growth.chosen`. Raises TypeError and ValueError."""
    block = check_options(block, density, criterion, per)
    check_multiple(tuple(weight.shape), block)
    grid = tuple(size // of for size, of in zip(weight.shape, block, strict=True))
    if weight.is_meta:
        mask = torch.zeros(grid, dtype=torch.bool, device="meta")
    else:
        mask = growth.chosen(weight.detach(), block, density, criterion, per)
    return Layout(mask, block, blocks_of(grid, density, per) if capacity is None else capacity)


def blocks_of(grid: tuple[int, ...], density: float, per: str) -> int:
    """How many blocks of a grid a density leaves."""
    rows, cols = grid
    return round(density * rows * cols) if per == "matrix" else rows * round(density * cols)


def check_options(block, density, criterion, per) -> tuple[int, int]:
    """Rows and columns of a block. Raises TypeError and ValueError for what does not say which
    blocks of a weight stay."""
    sizes = checked_block(block)
    check_density(density)
    check_per(per)
    if not isinstance(criterion, str) or criterion not in growth.CRITERIA:
        criteria = ", ".join(growth.CRITERIA)
        raise ValueError(f"criterion must be one of {criteria}, got {shown(criterion)}")
    return sizes


def check_multiple(
    shape: tuple[int, int], block: tuple[int, int], names: tuple[str, str] = FEATURES
) -> None:
    """Raises ValueError for a matrix, of sizes that have ``names``, that is not made of whole
    blocks."""
    for name, size, of in zip(names, shape, block, strict=True):
        if size % of:
            raise ValueError(
                f"{name} must be a multiple of {of}, as blocks are {block[0]} x {block[1]}, got "
                f"{size}"
            )


def check_layout(name: str, layout, shape: tuple[int, int]) -> None:
    """Raises TypeError for what is no Layout, ValueError for one of other sizes or with heads."""
    if not isinstance(layout, Layout):
        raise TypeError(f"{name} must be a kernlib.blocksparse.Layout, got {type(layout).__name__}")
    if layout.heads is not None:
        raise ValueError(f"{name} must be of one matrix, got {layout.heads} heads")
    if layout.shape != tuple(shape):
        raise ValueError(f"{name} must be of a matrix {tuple(shape)}, got {layout.shape}")


def check_kind(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ValueError for an input on another device than a layer's weight, TypeError for one of
    another dtype, unless autocast casts both."""
    if x.device != weight.device:
        raise ValueError(
            f"{name} must be on {weight.device} as the layer's weight is, got {x.device}"
        )
    if x.dtype != weight.dtype and not autocasts(x.device):
        raise TypeError(f"{name} must be {weight.dtype} as the layer's weight is, got {x.dtype}")


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Raises TypeError for another dtype than those of block-sparse products."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_TYPES:
        dtypes = ", ".join(str(kind).removeprefix("torch.") for kind in FLOAT_TYPES)
        raise TypeError(f"dtype must be one of {dtypes}, got {shown(dtype)}")
    return dtype


def placed(layout: Layout, place: torch.device) -> Layout:
    """The layout on a device. One that comes from meta, whose contents are unknown, becomes a
    layout without blocks, so that kernels do not go by uninitialised memory."""
    if layout.device.type != "meta" or place.type == "meta":
        return layout.to(place)
    heads = () if layout.heads is None else (layout.heads,)
    mask = torch.zeros((*heads, *layout.grid), dtype=torch.bool, device=place)
    return Layout(mask, layout.block, layout.capacity, place)
