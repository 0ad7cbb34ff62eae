"""How layers with a block-sparse weight hold their layout: its tensors are the indices of
:mod:`kernlib.nn.indexed`, and their mark has the bits that say which blocks are stored."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.families.blocksparse.contents import bits, host, writing
from kernlib.families.blocksparse.contents.given import has_values, outside
from kernlib.families.blocksparse.contents.sizes import NAMES
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.saved import header_of
from kernlib.nn.indexed import (
    DIGITS,
    EXTRA,
    MARK,
    IndexedModule,
    UnknownIndices,
    fingerprint,
    former_header,
    is_captured,
    is_close,
    plain,
)
from kernlib.nn.traced import has_own_mark
from kernlib.runtime.tensors import check_dense

INDICES = tuple(f"layout_{name}" for name in NAMES)


class LayoutModule(IndexedModule):
    """A layer with a layout that moves with it and is saved with it."""

    def __init__(self, layout: Layout):
        super().__init__()
        self._blank = False  # whether the stored blocks are still unknown
        self._source: torch.Tensor | None = None  # of the last change, by slots
        self._growth: torch.Tensor | None = None  # the gradient of blocks that are watched
        self._hold(layout)

    def _hold(self, layout: Layout) -> None:
        """Take a layout, and make its tensors the indices."""
        self._layout = layout
        layout.keep_for(type(self).__name__)
        self._put_indices(INDICES, layout.tensors)
        self._set_mark(mark_of(layout))

    def _hold_nothing(self, place: torch.device) -> None:
        """Take a layout without blocks until the stored ones are known."""
        current = self._layout
        heads = () if current.heads is None else (current.heads,)
        mask = torch.zeros((*heads, *current.grid), dtype=torch.bool, device=place)
        self._hold(Layout(mask, current.block, current.capacity, place))
        with torch.no_grad():
            self._buffers[MARK].zero_()  # the mark of no layout
        self._blank = True
        self._forget_mark()

    def _keep(self) -> None:
        """Take the blocks that the layout has been written with."""
        self._put_indices(INDICES, self._layout.tensors)
        self._blank = False
        self._set_mark(mark_of(self._layout))

    def _rewrite(self, mask: torch.Tensor) -> None:
        """Store the blocks of another mask, and leave the values to the caller."""
        self._layout.write_(mask)
        self._keep()

    # The layout that the layer has now.

    def _here(self) -> Layout:
        """The layout of this call, of the tensors that the layer has now: functional_call may have
        put others there. Raises ValueError and TypeError for tensors of another kind, RuntimeError
        for values of other blocks."""
        current = self._layout
        compiling = is_dynamo_compiling()
        # Dynamo guards the sizes of compared tensors. Tensors of two dimensions change with the
        # others, and their sizes may be 1, and so constants.
        first = 3 if compiling else 0
        for name, tensor in zip(INDICES[first:], current.tensors[first:], strict=True):
            if getattr(self, name) is not tensor:
                return self._of_others()
        if compiling:
            return self._compiled(current)
        return current if self._is_unwritten() else self._of_mark()

    def _compiled(self, current: Layout) -> Layout:
        """The layout of a compiled call, which does not look into the mark. Raises RuntimeError for
        another layer's mark."""
        if current.device.type == "meta" and self._buffers[MARK].device.type != "meta":
            raise RuntimeError(
                f"this {type(self).__name__} has been filled by name: call it once before it is "
                "compiled"
            )
        if not has_own_mark(self):
            raise RuntimeError(
                f"{MARK} of this {type(self).__name__} is another tensor than its own, which "
                "compiled calls do not read: load_state_dict makes it the layer's; without it "
                "functional_call computes at the blocks of the layer"
            )
        return current

    def _editable(self) -> Layout:
        """The layout, to be changed. Tensors that were put in the place of the layer's become its
        own from now on."""
        try:
            layout = self._here()
        except UnknownIndices:  # which a change mends
            if self._blank and has_values(*self._layout.tensors):  # and anybody may have written
                self._layout.write_(torch.zeros_like(self._layout.mask()))
            return self._layout
        if layout is not self._layout:
            self._hold(layout)
        return self._layout

    def _of_others(self) -> Layout:
        """The layout of other tensors than those held, looked at unless they stand for others."""
        current = self._layout
        tensors = {name: getattr(self, name) for name in INDICES}
        if is_dynamo_compiling():
            return Layout.from_layout(current.text, tuple(tensors.values()))
        check_dense(INDICES, **tensors)
        for stored, (name, other) in zip(current.tensors, tensors.items(), strict=True):
            if other.shape != stored.shape or other.dtype != stored.dtype:
                raise ValueError(
                    f"{name} must be {stored.dtype} of shape {tuple(stored.shape)}, got "
                    f"{other.dtype} of {tuple(other.shape)}"
                )
        passed = tuple(tensors.values())
        on_meta = [t.is_meta for t in passed]
        if any(on_meta) and not all(on_meta):
            raise ValueError("the tensors of a layout must all be on meta, or none of them")
        wrapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, passed))
        if wrapped or not has_values(*passed):
            return Layout.from_layout(current.text, passed)
        layout = self._noted_other(passed)
        if layout is None:
            writing.refuse_capture(passed[0].device, "looking at other tensors", "call it before")
            with outside():
                named = dict(zip(NAMES, (t.detach() for t in passed), strict=True))
                layout = Layout.from_state(header_of(current.text, named), named)
            self._note_other(passed, layout)
        return layout

    def _of_mark(self) -> Layout:
        """The layout that the mark says, where it was written, moved, or is another's. Where no
        blocks are known yet a loader has put it there, and the layout is the layer's own."""
        current, buffer = self._layout, self._buffers[MARK]
        mark, level = plain(buffer)
        if not has_values(mark) or is_captured(mark):
            return self._refuse_blank(current)
        is_empty = self._blank or not has_values(*current.tensors)
        is_own = buffer is self._seen[0] or is_empty
        noted = None if is_own else self._noted_other((buffer,))
        if noted is not None and noted.device == mark.device:
            return noted
        with outside(), torch.no_grad():
            if level is not None:
                return self._of_many(mark, level)
            layout = self._of_written(mark.clone(), is_own)
        if not is_own:
            self._note_other((buffer,), layout)
            return layout
        if buffer is self._buffers[MARK]:
            self._note_mark()
            self._settled = True
        return self._refuse_blank(layout)

    def _of_written(self, mark: torch.Tensor, is_own: bool) -> Layout:
        layout = self._layout
        if has_values(*layout.tensors):
            there = layout.to(mark.device)
            if there is not layout and is_own:
                self._hold_there(there, mark)
                there = self._layout
            if is_close(mark, mark_of(there)):
                return there
            layout = there
        return self._copied(mark, layout, is_own)

    def _hold_there(self, layout: Layout, mark: torch.Tensor) -> None:
        """Take a copy of the layout on the device to which the mark has moved."""
        self._hold(layout)
        if self._blank:
            self._hold_nothing(layout.device)
        self._take_mark(mark)

    def _copied(self, mark: torch.Tensor, layout: Layout, is_own: bool) -> Layout:
        """The layout of a mark that was copied here from another layer, as broadcasts and loaders
        do. Raises RuntimeError for an invalid one."""
        mask = mask_of(mark, layout)
        if mask is None:
            if self._blank or not has_values(*layout.tensors):
                raise UnknownIndices(self._without_blocks())
            raise UnknownIndices(
                f"the weight of this {type(self).__name__} may be one of other blocks than it "
                "stores: the buffer that says which has been written, or averaged with that of a "
                "layer of other blocks. Before copies are averaged, copy.update_(layer.layout."
                "mask()) stores the same blocks in both; or load a state_dict"
            )
        if not is_own:
            return Layout(mask, layout.block, layout.capacity, mark.device)
        if has_values(*layout.tensors):
            layout.write_(mask)
            self._put_indices(INDICES, layout.tensors)
        else:
            layout = Layout(mask, layout.block, layout.capacity, mark.device)
            self._hold(layout)
        self._blank, self._source, self._growth = False, None, None
        return layout

    def _of_many(self, marks: torch.Tensor, level: int) -> Layout:
        """The layouts of marks (layers, ...) that torch.vmap maps over, as one whose tensors it
        maps over too."""
        current = self._layout
        tensors = []
        for mark in marks.cpu():
            mask = mask_of(mark, current)
            if mask is None:
                raise RuntimeError(
                    f"torch.vmap maps over buffers of a {type(self).__name__} that say no layout "
                    f"of {current.text}"
                )
            tensors.append(Layout(mask, current.block, current.capacity, "cpu").tensors)
        stacks = (torch.stack(parts).to(marks.device) for parts in zip(*tensors, strict=True))
        add = torch._C._functorch._add_batch_dim
        return Layout.from_layout(current.text, tuple(add(t, 0, level) for t in stacks))

    def _refuse_blank(self, layout: Layout) -> Layout:
        if self._blank and has_values(*layout.tensors):
            raise UnknownIndices(self._without_blocks())
        return layout

    def _without_blocks(self) -> str:
        return (
            f"this {type(self).__name__} stores no blocks yet, as it comes from meta: load a "
            "state_dict, call update_ with a mask, or, of a layer that was made with a density, "
            "reset_parameters"
        )

    # Moving, saving and loading.

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == MARK and isinstance(value, torch.Tensor) and not is_dynamo_compiling():
            self._adopt()

    def _adopt(self) -> None:
        """Take the tensors that a loader has put there. The next call reports what is wrong with
        them."""
        with suppress(UnknownIndices):
            layout, mark = self._here(), self._buffers[MARK]
            if layout is self._layout and self._noted_other((mark,)) is layout:
                self._note_mark()  # as the layer's own, which compiled calls ask for

    def _apply(self, fn: Callable, recurse: bool = True):
        if not has_values(*self._layout.tensors):
            self._adopt()
        layout = self._layout
        # The contents that fn returns may be unset, as to_empty's are: only their device counts.
        probe = torch.empty(0, dtype=torch.int32, device=layout.device)
        self._apply_apart(fn, recurse)
        place = fn(probe).device
        if place != layout.device:
            self._move(layout, place)
        return self

    def _move(self, layout: Layout, place: torch.device) -> None:
        if layout.device.type == "meta":
            self._hold_nothing(place)
            return
        with torch.inference_mode(False), torch.no_grad():
            mark = self._buffers[MARK].detach().to(place, torch.float32)
        self._hold_there(layout.to(place), mark)  # which may have been written
        self._source = None if self._source is None else self._source.to(place)

    def _saved_carriers(self) -> dict[str, torch.Tensor]:
        """The mark anew, as whoever averages a state_dict in place may write it. Raises as
        :meth:`_here`."""
        if not self.persistent:
            return {}
        try:
            layout = self._here()
        except UnknownIndices:
            if self._blank or not has_values(*self._layout.tensors):
                return {}  # and so the buffer, which stands for no blocks
            raise
        return {MARK: mark_of(layout)} if has_values(*layout.tensors) else {}

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        self._read_share(state_dict, prefix)
        is_saved = self.persistent and (prefix + MARK in state_dict or prefix + EXTRA in state_dict)
        if is_saved:
            assigned = local_metadata.get("assign_to_params_buffers", False)
            try:
                self._load_layout(state_dict, prefix, assigned)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
                return
        self._load_apart(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if is_saved:
            keys = [prefix + name for name in (MARK, EXTRA, *INDICES)]
            unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]
        elif self.persistent and strict:
            missing_keys.append(prefix + MARK + self._share)

    def _load_layout(self, state_dict: dict, prefix: str, assigned: bool) -> None:
        """Take the layout in a state_dict, in place unless it is to be assigned or the layer is on
        meta. Raises TypeError and ValueError."""
        self._check_weight(state_dict.get(prefix + "weight"))
        current = self._layout
        if prefix + MARK in state_dict:
            layout = self._of_saved(state_dict[prefix + MARK])
        else:
            layout = self._of_former(state_dict, prefix)
        self._source = self._growth = None
        if assigned:
            self._hold(layout)
        elif current.device.type != "meta":
            with torch.inference_mode(False), torch.no_grad():
                for mine, loaded in zip(current.tensors, layout.tensors, strict=True):
                    mine.copy_(loaded)
            self._keep()
        else:
            return
        self._blank = False

    def _check_weight(self, weight: object) -> None:
        """Raises ValueError for a weight that does not fit the layout to be loaded."""
        mine = self._parameters.get("weight")
        if mine is None:  # parametrized or pruned, under other names
            return
        if weight is None:
            raise ValueError("it has a layout and no weight, whose blocks would be those of before")
        shape = tuple(getattr(weight, "shape", ()))
        if shape != tuple(mine.shape):
            raise ValueError(
                f"the weight loaded has shape {shape}, that of the layer {tuple(mine.shape)}: make "
                "a layer of the block, the density and the capacity that were saved"
            )

    def _of_saved(self, mark: object) -> Layout:
        """The layout that the mark in a state_dict says. Raises ValueError."""
        current = self._layout
        if not isinstance(mark, torch.Tensor) or not has_values(plain(mark)[0]):
            raise ValueError(f"{MARK} must be a tensor with values, got {type(mark).__name__}")
        with outside(), torch.no_grad():
            mask = mask_of(mark, current)
            if mask is not None:
                return Layout(mask, current.block, current.capacity, mark.device)
            if not bool(mark.count_nonzero()):
                raise ValueError("what is loaded was saved of a layer that stored no blocks yet")
        raise ValueError(
            f"its {MARK} says no blocks of a layer of {current.text}: it was damaged or averaged, "
            "or saved of a layer of other sizes"
        )

    def _of_former(self, state_dict: dict, prefix: str) -> Layout:
        """The layout in a state_dict of version 0.1: a header, and tensors by their names. Raises
        TypeError and ValueError."""
        header, current = former_header(state_dict[prefix + EXTRA], "layout"), self._layout
        names = {prefix + index: name for name, index in zip(NAMES, INDICES, strict=True)}
        tensors = {name: state_dict[key] for key, name in names.items() if key in state_dict}
        layout = Layout.from_state(header, tensors)
        if layout.text != current.text:
            raise ValueError(
                f"the layout loaded has {layout.text}, that of the layer {current.text}: make a "
                "layer of the density and capacity that were saved"
            )
        return layout

    def __getstate__(self) -> dict:
        """The layout as such, which looks at its tensors when it is unpickled."""
        if not has_values(*self._layout.tensors):
            self._adopt()
        state = {k: v for k, v in self.__dict__.items() if k not in INDICES}
        return {**state, "_seen": None, "_other": None}

    def __setstate__(self, state: dict) -> None:
        """Raises ValueError for an invalid layout."""
        # Pickles of version 0.1 hold the tensors as buffers, and no mark.
        buffers = {name: t for name, t in state["_buffers"].items() if name not in INDICES}
        mark = buffers.pop(MARK, None)
        former = {"_indices": (), "_settled": False, "_blank": False, "_density": None}
        nn.Module.__setstate__(self, {**former, **state, "_buffers": buffers})
        blank = self._blank
        if blank:
            self._hold_nothing(self._layout.device)
        else:
            self._hold(self._layout)
        if mark is not None:
            self._take_mark(mark)


def mark_of(layout: Layout) -> torch.Tensor:
    """The mark of a layout, float32: the bits of its lines, 4 to a number, and a fingerprint of
    these and of its sizes. Does not wait for the device."""
    twin = host.on_host(layout) or layout  # on the host no operator has to be loaded
    with outside(), torch.no_grad():
        return _marked(twin.tensors[0], layout).to(layout.device)


def _marked(words: torch.Tensor, layout: Layout) -> torch.Tensor:
    parts = words.contiguous().view(torch.uint8).flatten()
    numbers = torch.stack([parts & 15, parts >> 4], -1).flatten()
    salt = zlib.crc32(f"{layout.block} {layout.grid} {layout.heads}".encode())
    return torch.cat([numbers.to(torch.float32), fingerprint([words], salt)])


def mask_of(mark: torch.Tensor, layout: Layout) -> torch.Tensor | None:
    """The mask that the mark of a layout of these sizes holds, on the CPU; None for what is no
    mark."""
    shape = layout.tensors[0].shape
    size = 8 * shape.numel()
    if tuple(mark.shape) != (size + DIGITS,) or not mark.is_floating_point():
        return None
    mark = mark.detach().float().cpu()
    low, high = (
        mark[:size].nan_to_num(0.0).round().clamp(0, 15).to(torch.uint8).view(-1, 2).unbind(1)
    )
    words = (low | high << 4).view(torch.int32).view(shape)
    mask = bits.unpack(words, layout.grid[1])
    if int(mask.count_nonzero()) > layout.capacity or not is_close(
        mark, _marked(bits.pack(mask), layout)
    ):
        return None
    return mask.view(layout.grid if layout.heads is None else (layout.heads, *layout.grid))
