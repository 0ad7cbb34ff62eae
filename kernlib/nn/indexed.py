"""What layers share whose weight is values and indices, such as which columns or blocks are stored.

Indices are not numbers: half of one, or the average of two, is no index, and a kernel that used it
would leave its memory. So the tensors that hold them are plain attributes of the layer, neither
parameters nor buffers, which utilities of torch average, cast, draw and broadcast.

In their place there is one buffer, the mark: whole numbers that say which indices the layer has,
exact in every dtype. It moves wherever parameters move. Averages of equal marks are that mark, and
so say that the values were averaged over equal indices. Any other mark than the layer's own says
that its values are no longer those of its indices.

Besides parameters a state_dict holds one tensor under the name of a buffer: so loaders that ask a
module for its names, and fill it tensor by tensor, fill these layers. See
docs/concepts/layers.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import ClassVar

import torch
from torch import nn
from torch._C import _functorch

from kernlib.descriptors import nesting
from kernlib.runtime.tensors import stand_ins

MARK = "index_mark"
EXTRA = "_extra_state"  # of a state_dict of version 0.1: the header of the tensors beside it
DIGITS = 16  # of a fingerprint, of 4 bits each
TOLERANCE = 2.0**-7  # what averages of equal numbers up to 15 may lose to rounding, in bfloat16
_CHUNK = 1 << 24  # bytes of a tensor whose sum is mixed at a time
_PIECE = 1 << 21  # summed at a time, which takes four times as many bytes
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of 64 bits


class UnknownIndices(RuntimeError):
    """A layer's indices are unknown, or its mark is another layer's."""


class IndexedModule(nn.Module):
    """A layer with tensors of indices."""

    persistent: ClassVar[bool] = True  # whether a state_dict holds the mark
    carriers: ClassVar[tuple[str, ...]] = (MARK,)  # buffers that loaders write, and the layer reads
    _share = ""  # what names of carriers end with in a state_dict, of a layer of several processes

    def __init__(self) -> None:
        super().__init__()
        self._indices: tuple[str, ...] = ()  # names
        # The mark that was last compared, its version and its device's number; and whether one of
        # these indices was right before.
        self._seen: tuple[torch.Tensor | None, int | None, int] = None, None, -1
        self._settled = False
        # Other tensors than the layer's own, their versions, and what they are.
        self._other: tuple[tuple[torch.Tensor, ...], int | None, object] | None = None

    # The tensors of indices.

    def _put_indices(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._drop_indices()
        self.__dict__.update(zip(names, tensors, strict=True))
        self._indices, self._other = tuple(names), None

    def _drop_indices(self) -> None:
        """Remove the tensors, which are attributes, or parameters where a wrapper made them
        such."""
        for name in self._indices:
            self.__dict__.pop(name, None)
            self._parameters.pop(name, None)
        self._indices = ()

    # The mark.

    def _set_mark(self, mark: torch.Tensor) -> None:
        """Say which indices there are, in the buffer that is there if it is one of its kind:
        others, such as DistributedDataParallel, hold it."""
        old = self._buffers.get(MARK)
        if old is None or not _is_alike(old, mark):
            self.register_buffer(MARK, mark, persistent=self.persistent)
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
            self.register_buffer(MARK, mark.clone(), persistent=self.persistent)
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

    def _noted_other(self, tensors: Sequence[torch.Tensor]) -> object:
        """The noted value of other tensors, None if they are new or were written since."""
        noted, versions, value = self._other or ((), None, None)
        same = len(noted) == len(tensors) and all(map(is_, noted, tensors))
        return value if same and versions is not None and versions_of(tensors) == versions else None

    def _note_other(self, tensors: Sequence[torch.Tensor], value: object) -> None:
        self._other = tuple(tensors), versions_of(tensors), value

    # Moving and saving.

    def _apply_apart(self, fn: Callable, recurse: bool) -> None:
        """``Module._apply`` of everything but the indices and the carriers."""
        with self._without_carriers():
            super()._apply(fn, recurse)
        if getattr(fn, "__qualname__", "").startswith("Module.share_memory"):
            for name in self._indices:
                getattr(self, name).share_memory_()

    def _load_apart(self, *args) -> None:
        """``Module._load_from_state_dict`` of everything but these."""
        with self._without_carriers():
            super()._load_from_state_dict(*args)

    @contextmanager
    def _without_carriers(self) -> Iterator[None]:
        buffers = {name: self._buffers.pop(name) for name in self.carriers}
        try:
            yield
        finally:
            self._buffers.update(buffers)

    def _saved_carriers(self) -> dict[str, torch.Tensor]:
        """The tensors that a state_dict holds in place of the buffers of these names."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        saved = self._saved_carriers()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update((prefix + name, tensor) for name, tensor in saved.items())
        if self._share:
            for name in self.carriers:
                if prefix + name in destination:
                    destination[prefix + name + self._share] = destination.pop(prefix + name)

    def _save_as_share(self, rank: int, size: int) -> None:
        """Have a state_dict say that its carriers are those of one of several processes, each of
        which has a part of the matrix: torch's checkpoints take tensors of one name for one tensor,
        of which they keep any process's."""
        self._share = f"_{rank}_of_{size}"
        for name in self.carriers:  # torch looks for an attribute of each name in a state
            self.__dict__.setdefault(name + self._share, None)

    def _read_share(self, state_dict: dict, prefix: str) -> None:
        """Put carriers under their own names that :meth:`_save_as_share` has others for."""
        for name in self.carriers if self._share else ():
            if prefix + name + self._share in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + name + self._share)


def former_header(state: torch.Tensor, kind: str) -> dict:
    """The header in the extra state of a layer, as version 0.1 saved it: the bytes of a JSON text.
    Raises ValueError for what is none, whatever it is, as a loader hands over what a file says, and
    for a long one; ``kind`` is what it is the header of."""
    try:
        text = bytes(state.flatten()[: nesting.LONGEST + 1].tolist()).decode()
        nesting.check_size(text)
        header = json.loads(text)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # RecursionError is the second
        raise ValueError(f"its extra state is no header of a {kind}") from None
    if not isinstance(header, dict):
        raise ValueError(f"what is loaded was saved of a layer without a {kind}")
    return header


def fingerprint(tensors: Sequence[torch.Tensor], salt: int = 0) -> torch.Tensor:
    """Whole numbers from 0 to 15, float32 (DIGITS,), of a number below 2^63 and the bytes of
    tensors, the same on every device. Does not wait for it."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device) + salt
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        total = _mixed(total + flat.numel() + 1)
        for start in range(0, flat.numel(), _CHUNK):
            total = _mixed(total + _summed(flat[start : start + _CHUNK]))
    shifts = torch.arange(0, 4 * DIGITS, 4, dtype=torch.int64, device=total.device)
    return (total >> shifts & 15).to(torch.float32)


def _summed(flat: torch.Tensor) -> torch.Tensor:
    """The sum of words of 8 bytes, each times an odd number of its place, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _PIECE):
        some = flat[start : start + _PIECE]
        if some.numel() % 8:
            some = nn.functional.pad(some, (0, -some.numel() % 8))
        elif some.storage_offset() % 8:
            some = some.clone()
        words, first = some.view(torch.int64), start // 8 + 1
        places = torch.arange(first, first + len(words), dtype=torch.int64, device=words.device)
        total = total + (words * (_mixed(places) | 1)).sum()
    return total


def _mixed(v: torch.Tensor) -> torch.Tensor:
    for factor in _FACTORS:
        v = v * factor
        v = v ^ (v >> 29)
    return v


def is_close(mark: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a mark is one but for rounding. Waits for the device."""
    if mark.shape != expected.shape or not mark.is_floating_point():
        return False
    return bool(((mark.to(expected.dtype) - expected).abs() <= TOLERANCE).all())


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
