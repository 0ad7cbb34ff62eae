"""What layers share whose weight is values and indices, such as which columns or blocks are stored.

Indices are not numbers: half of one, or the average of two, is none, and a kernel that went by it
would leave its memory. So the tensors that hold them are plain attributes of the layer, neither
parameters nor buffers, which utilities of torch average, cast, draw and broadcast. Only as long as
a layer waits for them, on meta or behind it, are they buffers, for loaders that fill a module by
the names of its buffers; no kernel reads them there.

In their place there is one buffer, the mark: whole numbers that say which indices the layer has,
exact in every dtype. It goes wherever parameters go, by whatever moves them. Averages of equal
marks are that mark, and so say that the values were averaged over equal indices. Any other mark
than the layer's own says that its values are no longer those of its indices. See
docs/concepts/layers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import ClassVar

import torch
from torch import nn
from torch._C import _functorch

from kernlib.runtime.tensors import stand_ins

MARK = "_mark"
DIGITS = 16  # of a fingerprint, of 4 bits each
TOLERANCE = 2.0**-7  # what averages of equal numbers up to 15 may lose to rounding, in bfloat16
_EXTRA = "_extra_state"
_CHUNK = 1 << 24  # bytes of a tensor that are summed at a time
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of 64 bits


class IndexedModule(nn.Module):
    """A layer with tensors of indices, which a ``state_dict`` holds by their names."""

    persistent: ClassVar[bool] = True  # whether a state_dict holds the indices

    def __init__(self) -> None:
        super().__init__()
        self._indices: tuple[str, ...] = ()  # names
        # The mark that was last compared, its version and its device's number; and whether one of
        # these indices was found right before.
        self._seen: tuple[torch.Tensor | None, int | None, int] = None, None, -1
        self._settled = False
        # Other tensors than the layer's own, their versions, and what they were found to be.
        self._other: tuple[tuple[torch.Tensor, ...], int | None, object] | None = None

    # The tensors of indices.

    def _put_indices(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], to_fill: bool = False
    ) -> None:
        """Take tensors, which are buffers if a loader is ``to_fill`` them, as those on meta."""
        self._drop_indices()
        for name, tensor in zip(names, tensors, strict=True):
            if to_fill or tensor.is_meta:
                self.register_buffer(name, tensor, persistent=self.persistent)
            else:
                self.__dict__[name] = tensor
        self._indices, self._other = tuple(names), None

    def _drop_indices(self) -> dict[str, torch.Tensor]:
        """Take the tensors away, be they attributes, buffers or, where somebody has wrapped them,
        parameters; and return them."""
        places = self.__dict__, self._buffers, self._parameters
        dropped = {n: place.pop(n) for n in self._indices for place in places if n in place}
        self._indices = ()
        return dropped

    # The mark.

    def _set_mark(self, mark: torch.Tensor) -> None:
        """Say which indices there are, in the buffer that is there if it is one of its kind:
        others, such as DistributedDataParallel, hold it."""
        old = self._buffers.get(MARK)
        if old is None or not _is_alike(old, mark):
            self.register_buffer(MARK, mark, persistent=False)
        else:
            with torch.no_grad():
                old.copy_(mark)
        self._note_mark()
        self._settled = False

    def _note_mark(self) -> None:
        """Take the mark as it is for right."""
        mark = self._buffers[MARK]
        self._seen = mark, version_of(mark), mark.get_device()

    def _take_mark(self, mark: torch.Tensor) -> None:
        """Put a copy of a mark there that others may have written, to be compared in the next
        call."""
        with torch.inference_mode(False), torch.no_grad():
            self.register_buffer(MARK, mark.clone(), persistent=False)
        self._forget_mark()

    def _forget_mark(self) -> None:
        """Have the mark compared in the next call."""
        mark = self._buffers[MARK]
        self._seen = mark, None, mark.get_device()
        self._settled = False

    def _is_unwritten(self) -> bool:
        """Whether the mark is the one that was last compared. Where gradients are recorded, a write
        to it is looked at once for the same indices: DistributedDataParallel writes all buffers in
        each forward pass, and a look waits for a GPU."""
        seen, mark = self._seen, self._buffers[MARK]
        if mark is not seen[0] or mark.get_device() != seen[2]:
            return False
        try:
            return mark._version == seen[1] or (self._settled and torch.is_grad_enabled())
        except RuntimeError:  # one of inference mode, put there by .data
            return False

    def _known_other(self, tensors: Sequence[torch.Tensor]) -> object:
        """What other tensors were found to be, None if they are new or were written since."""
        known, versions, found = self._other or ((), None, None)
        same = len(known) == len(tensors) and all(map(is_, known, tensors))
        return found if same and versions is not None and versions_of(tensors) == versions else None

    def _note_other(self, tensors: Sequence[torch.Tensor], found: object) -> None:
        self._other = tuple(tensors), versions_of(tensors), found

    # Moving and saving.

    def _apply_apart(self, fn: Callable, recurse: bool) -> None:
        """``Module._apply`` of everything but the indices and the mark."""
        apart = [name for name in (*self._indices, MARK) if name in self._buffers]
        buffers = {name: self._buffers.pop(name) for name in apart}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(buffers)
        if getattr(fn, "__qualname__", "").startswith("Module.share_memory"):
            for name in self._indices:
                getattr(self, name).share_memory_()

    def _load_apart(self, *args) -> None:
        """``Module._load_from_state_dict`` of everything but the indices."""
        apart = [name for name in self._indices if name in self._buffers]
        buffers = {name: self._buffers.pop(name) for name in apart}
        try:
            super()._load_from_state_dict(*args)
        finally:
            self._buffers.update(buffers)

    def _saved_indices(self) -> dict[str, torch.Tensor]:
        """What a state_dict holds by their names."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.persistent:
            extra = destination.pop(prefix + _EXTRA, None)
            for name, tensor in self._saved_indices().items():
                destination[prefix + name] = tensor
            if extra is not None:  # behind the tensors, as modules have it
                destination[prefix + _EXTRA] = extra


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whole numbers from 0 to 15, float32 (DIGITS,), of the bytes of tensors, the same on every
    device. Does not wait for it."""
    found = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found = _mixed(found + flat.numel() + 1)
        for start in range(0, flat.numel(), _CHUNK):
            found = _mixed(found + _summed(flat[start : start + _CHUNK]))
    shifts = torch.arange(0, 4 * DIGITS, 4, dtype=torch.int64, device=found.device)
    return (found >> shifts & 15).to(torch.float32)


def _summed(flat: torch.Tensor) -> torch.Tensor:
    """The sum of words of 8 bytes, each times an odd number of its place, modulo 2^64."""
    if flat.numel() % 8:
        flat = nn.functional.pad(flat, (0, -flat.numel() % 8))
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
    return (words * (_mixed(places) | 1)).sum()


def _mixed(v: torch.Tensor) -> torch.Tensor:
    for factor in _FACTORS:
        v = v * factor
        v = v ^ (v >> 29)
    return v


def is_close(mark: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a mark is one but for rounding. Waits for the device."""
    if mark.shape != wanted.shape or not mark.is_floating_point():
        return False
    return bool(((mark.to(wanted.dtype) - wanted).abs() <= TOLERANCE).all())


def plain(mark: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """A mark without transforms of torch.func, and the level of the torch.vmap that maps over it,
    along the first dimension then; None if there is none."""
    level = None
    while _functorch.is_functorch_wrapped_tensor(mark):
        inner = _functorch.get_unwrapped(mark)
        if _functorch.is_batchedtensor(mark):
            level = _functorch.maybe_get_level(mark)
            inner = inner.movedim(_functorch.maybe_get_bdim(mark), 0)
        mark = inner
    return mark, level


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured, in which nothing can wait for the device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def version_of(tensor: torch.Tensor) -> int | None:
    """How often torch has counted a write; None for a tensor of inference mode, of which it does
    not."""
    return None if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> int | None:
    """The writes to all of these that torch has counted; None where it does not."""
    versions = [version_of(t) for t in tensors]
    return None if None in versions else sum(versions)


def _is_alike(old: torch.Tensor, mark: torch.Tensor) -> bool:
    """Whether one can be written with the other: by anybody, at any time."""
    if stand_ins(old, mark) or old.is_inference() or _functorch.is_functorch_wrapped_tensor(old):
        return False
    return (old.shape, old.dtype, old.device) == (mark.shape, mark.dtype, mark.device)
