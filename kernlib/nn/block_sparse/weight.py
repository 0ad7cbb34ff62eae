"""What layers with a trainable block-sparse weight share: they hold its layout, save it, move it,
and change it in place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import shown
from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.contents.given import Mask, has_values, place_of
from kernlib.families.blocksparse.contents.sizes import NAMES, checked_block, checked_count
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.sparse.prune import check_density, check_per
from kernlib.nn.block_sparse import growth
from kernlib.nn.kronecker_sparse_algorithms import autocasts
from kernlib.runtime.dtypes import KERNEL_TYPES, accumulator
from kernlib.runtime.tensors import check_dense, check_flag

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = (*KERNEL_TYPES, torch.float64)
_EXTRA = "_extra_state"
FEATURES = ("out_features", "in_features")  # rows and columns of a weight
BUFFERS = tuple(f"layout_{name}" for name in NAMES)


class BlockSparseModule(nn.Module):
    """A layer whose ``weight`` (capacity, block rows, block columns) holds the stored blocks of a
    matrix, in the order of its :attr:`layout`."""

    persistent: ClassVar[bool] = True  # whether a state_dict holds the layout

    def __init__(self, layout: Layout, dtype: torch.dtype | None):
        super().__init__()
        dtype = checked_dtype(dtype)
        shape = layout.capacity, *layout.block
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=layout.device))
        self._hold(layout)
        self._source: torch.Tensor | None = None  # of the last change, by slots
        self._candidates: Layout | None = None  # that are watched
        self._growth: torch.Tensor | None = None  # their gradient

    @property
    def layout(self) -> Layout:
        """Which blocks are stored. To change them call :meth:`update_`, :meth:`drop_` or
        :meth:`regrow_` of the layer, which take the values along; its own is refused."""
        return self._layout

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

        ``mask`` is as that of :meth:`kernlib.blocksparse.Layout.update_`, which says when too many
        blocks raise and when they are dropped, and which does not wait for a GPU. What others hold
        of the weight does not move, such as an average in ``torch.optim.swa_utils.AveragedModel``:
        :meth:`remap` moves it. Raises TypeError for what is no optimizer, ValueError for one of
        other parameters, RuntimeError for a weight that is parametrized or pruned.
        """
        self._check_change(optimizer)
        before = growth.places(self._layout)
        self._layout.write_(mask)
        self._source = growth.sources(before, self._layout)
        held = [self.weight, self.weight.grad]
        if optimizer is not None:
            held += optimizer.state.get(self.weight, {}).values()
        for tensor in held:
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

    def _is_by_slots(self, held: object) -> bool:
        """Whether it has a part for each slot: a moment of the weight's shape, or what Adafactor
        keeps of the rows and of the columns of each."""
        weight = self.weight
        return isinstance(held, torch.Tensor) and held.dim() == 3 and len(held) == len(weight)

    def drop_(
        self,
        count: int | None = None,
        density: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Self:
        """Drop the ``count`` stored blocks of smallest Frobenius norm, or so many that a part
        ``density`` of all blocks of the matrix stays, in place, as :meth:`update_` does, and return
        the layer. Nothing waits for a GPU. Raises TypeError and ValueError unless one of the two is
        given and right."""
        if (count is None) == (density is None):
            raise ValueError(f"give count or density, one of them; got {count!r} and {density!r}")
        if count is None:
            check_density(density)
            kept = round(density * growth.total(self._layout))
        else:
            kept = self._layout.tensors[5][0] - checked_count("count", count, 0)
        norms = growth.squares(self.weight)
        return self.update_(growth.without_smallest(self._layout, norms, kept), optimizer)

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
        mine = self._layout
        if candidates is None:
            every = torch.ones(mine.grid, dtype=torch.bool, device=mine.device)
            candidates = Layout(every, mine.block, growth.total(mine))
        check_layout("candidates", candidates, mine.shape)
        if candidates.block != mine.block:
            raise ValueError(f"candidates must have blocks {mine.block}, got {candidates.block}")
        self._candidates = candidates.to(mine.device)
        return self

    @property
    def growth_candidates(self) -> Layout | None:
        """The blocks that are watched, None if none are."""
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
        None takes that many. Begins a new :attr:`growth_gradient`. Nothing waits for a GPU.

        With :meth:`drop_` this is a step of RigL: Evci, Gale, Menick, Castro and Elsen, "Rigging
        the Lottery: Making All Tickets Winners" (2020). Raises RuntimeError if no gradient was
        computed since :meth:`watch_growth`, TypeError and ValueError for other counts.
        """
        layout = self._layout
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
        found = self._candidate_gradient(grad, x.to(grad.dtype), self._candidates)
        if self._growth is None:
            self._growth = found.to(accumulator(found.dtype))
        else:
            self._growth.add_(found)

    def _candidate_gradient(self, grad, x, candidates: Layout) -> torch.Tensor:
        raise NotImplementedError

    # The layout, and the buffers that are its tensors.

    def _hold(self, layout: Layout) -> None:
        """Take a layout, and make its tensors the buffers."""
        self._layout = layout
        layout.keep_for(type(self).__name__)
        for name, tensor in zip(BUFFERS, layout.tensors, strict=True):
            self.register_buffer(name, tensor, persistent=self.persistent)

    def _here(self) -> Layout:
        """The layout of the buffers as they are now: functional_call, among others, puts other
        tensors there. Raises ValueError and TypeError where they are none of its kind."""
        held, buffers = self._layout, self._buffers
        for name, tensor in zip(BUFFERS, held.tensors, strict=True):
            if buffers[name] is not tensor:
                return _of_others(held, {name: buffers[name] for name in BUFFERS})
        return held

    def _apply(self, fn: Callable, recurse: bool = True):
        layout = self._layout
        # What fn answers for contents, such as to_empty's, may be none. Where it puts them counts.
        probe = torch.empty(0, dtype=torch.int32, device=layout.device)
        held = {name: self._buffers.pop(name) for name in BUFFERS}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(held)
        place = fn(probe).device
        if place != layout.device:
            self._hold(placed(layout, place))
            self._source = None if self._source is None else self._source.to(place)
            if self._candidates is not None:
                self.watch_growth(True, placed(self._candidates, place))
        return self

    # Saving, and what is saved.

    def get_extra_state(self) -> torch.Tensor:
        """Everything of the layout but its tensors, as the bytes of a JSON text in a tensor:
        formats of files that hold tensors alone, such as safetensors, take it."""
        held = self._layout
        header = held.state()[0] if has_values(*held.tensors) else None
        text = json.dumps(header, sort_keys=True).encode()
        return torch.tensor(list(text), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Nothing: the layout was made of it together with its tensors."""

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        headed = self.persistent and prefix + _EXTRA in state_dict
        if headed:
            assigned = local_metadata.get("assign_to_params_buffers", False)
            try:
                self._load_layout(state_dict, prefix, assigned)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
                return
        # Which are loaded already, or cannot be, as nothing says what they are.
        kept = {name: self._buffers.pop(name) for name in BUFFERS}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._buffers.update(kept)
        known = [prefix + name for name in BUFFERS]
        if headed:
            unexpected_keys[:] = [key for key in unexpected_keys if key not in known]
        elif self.persistent and strict:
            missing_keys += [key for key in known if key not in state_dict]

    def _load_layout(self, state_dict: dict, prefix: str, assigned: bool) -> None:
        """Take the layout in a state_dict, in place unless it is to be assigned or the layer is on
        meta. Raises TypeError and ValueError."""
        weight = state_dict.get(prefix + "weight")
        if weight is None and "weight" in self._parameters:
            raise ValueError("it has a layout and no weight, whose blocks would be those of before")
        header = _header(state_dict[prefix + _EXTRA])
        names = {prefix + buffer: name for name, buffer in zip(NAMES, BUFFERS, strict=True)}
        tensors = {name: state_dict[key] for key, name in names.items() if key in state_dict}
        found = Layout.from_state(header, tensors)
        held = self._layout
        if found.text != held.text:
            raise ValueError(
                f"the layout loaded has {found.text}, that of the layer {held.text}: make a layer "
                "of the density and capacity that were saved"
            )
        self._source = self._growth = None
        if assigned:
            self._hold(found)
        elif held.device.type != "meta":
            with torch.inference_mode(False), torch.no_grad():
                for mine, loaded in zip(held.tensors, found.tensors, strict=True):
                    mine.copy_(loaded)

    def __getstate__(self) -> dict:
        """The layout as such, which looks at its tensors when it is unpickled."""
        buffers = {name: None if name in BUFFERS else t for name, t in self._buffers.items()}
        return {**self.__dict__, "_buffers": buffers}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._hold(state["_layout"])


def layout_for(
    given: Layout | int | tuple[int, int],
    shape: tuple[int, int],
    density: float | None,
    capacity: int | None,
    device: torch.device | str | int | None,
    names: tuple[str, str] = FEATURES,
) -> Layout:
    """A layout of its own for a matrix of a shape: a copy of one that is given, or one of blocks of
    a given size, drawn with the seed that torch's generator of the CPU makes. Raises TypeError and
    ValueError."""
    if isinstance(given, Layout):
        if density is not None or capacity is not None:
            raise ValueError("density and capacity go with a block; a Layout has its own")
        check_layout("layout", given, shape)
        place = given.device if device is None else place_of(device, None)
        moved = given.to(place)
        return copy.deepcopy(given) if moved is given else moved
    if isinstance(given, torch.Tensor):
        raise TypeError(
            "layout must be a kernlib.blocksparse.Layout or the size of blocks, got a tensor; "
            "Layout(mask, block) makes one of a mask"
        )
    block = checked_block(given)
    if density is None:
        raise ValueError("density must be given with a block: the part of all blocks to store")
    check_density(density)
    check_multiple(shape, block, names)
    place = place_of(device, None)
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    made = builders.random(*shape, block, density, seed=seed, device="cpu")
    return Layout(made.mask(), block, capacity, place)


def layout_of_weight(
    weight: torch.Tensor, block, density: float, criterion: str, per: str, capacity: int | None
) -> Layout:
    """The layout of the blocks of a matrix that stay, where it lies; see
    :func:`kernlib.nn.block_sparse.growth.chosen`. Raises TypeError and ValueError."""
    block = check_options(block, density, criterion, per)
    if weight.is_meta:
        raise ValueError("the weight is on meta, without values to choose blocks by: load it first")
    check_multiple(tuple(weight.shape), block)
    mask = growth.chosen(weight.detach(), block, density, criterion, per)
    rows, cols = mask.shape
    live = round(density * rows * cols) if per == "matrix" else rows * round(density * cols)
    return Layout(mask, block, live if capacity is None else capacity)


def check_options(block, density, criterion, per) -> tuple[int, int]:
    """Rows and columns of a block. Raises TypeError and ValueError for what does not say which
    blocks of a weight stay."""
    sizes = checked_block(block)
    check_density(density)
    check_per(per)
    if not isinstance(criterion, str) or criterion not in growth.CRITERIA:
        known = ", ".join(growth.CRITERIA)
        raise ValueError(f"criterion must be one of {known}, got {shown(criterion)}")
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
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise TypeError(f"dtype must be one of {known}, got {shown(dtype)}")
    return dtype


def placed(layout: Layout, place: torch.device) -> Layout:
    """The layout on a device; one without blocks for one that comes from meta, whose contents
    nobody knows, so that kernels read nothing by what memory happens to hold."""
    if layout.device.type != "meta" or place.type == "meta":
        return layout.to(place)
    heads = () if layout.heads is None else (layout.heads,)
    mask = torch.zeros((*heads, *layout.grid), dtype=torch.bool, device=place)
    return Layout(mask, layout.block, layout.capacity, place)


def _header(state) -> dict:
    """The header in an extra state. Raises ValueError."""
    try:
        header = json.loads(bytes(state.tolist()).decode())
    except (AttributeError, RuntimeError, TypeError, ValueError):  # RecursionError is the second
        raise ValueError("its extra state is no header of a layout") from None
    if not isinstance(header, dict):
        raise ValueError("what is loaded was saved of a layer on meta, without contents")
    return header


def _of_others(held: Layout, tensors: dict[str, torch.Tensor]) -> Layout:
    """The layout of other tensors than those held, by the names of the buffers."""
    if not is_dynamo_compiling():
        check_dense(tuple(tensors), **tensors)
        for tensor, (name, other) in zip(held.tensors, tensors.items(), strict=True):
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                raise ValueError(
                    f"{name} must be {tensor.dtype} of shape {tuple(tensor.shape)}, got "
                    f"{other.dtype} of {tuple(other.shape)}"
                )
    return Layout.from_layout(held.text, tuple(tensors.values()))
