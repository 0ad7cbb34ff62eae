"""What processes agree on before a call, over gloo beside the group of the user."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_MOST_CHECKED = 256
_DIGEST = 16  # bytes
_SIZES = 4  # numbers that processes tell each other in every call
_ROW = struct.Struct(f"=q{_DIGEST}s{_SIZES}q")  # whether this process refuses, digest, sizes
_ZEROS = (0,) * _SIZES


class Checked(NamedTuple):
    """Texts, by name, that must be equal in all processes of a call, and their digest."""

    texts: dict[str, str]
    digest: bytes


class Agreement:
    """Of the processes of a group with one timeout: their group over gloo, and what calls have
    passed their checks. It holds no reference to the group, whose life it shares."""

    def __init__(self):
        self._control: dist.ProcessGroup | None = None
        self._checked: dict[tuple, Checked] = {}

    def control(self, group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
        """The group over gloo of the same processes."""
        if self._control is None:
            ranks = dist.get_process_group_ranks(group)
            control = dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout),
                backend="gloo",
                use_local_synchronization=True,
            )
            with torch.inference_mode(False):  # calls outside of it write them as well
                row, rows = (
                    torch.zeros((count, _ROW.size), dtype=torch.uint8, device="cpu")
                    for count in (1, len(ranks))
                )
            self._tensors = [list(rows)], list(row)
            self._row, self._rows = (memoryview(t.view(-1).numpy()) for t in (row, rows))
            self._control = control  # last: what fails before is tried again
        return self._control

    def checked(
        self,
        task: str,
        texts: Callable[[], dict[str, str]],
        key: Callable[[], Hashable] | None = None,
    ) -> Checked:
        """What ``texts`` returns, or has returned for an equal key: that is what the texts and
        their checks depend on. TypeError or AttributeError say that it is nothing plain."""
        place = result = None
        if key is not None:
            try:
                place = task, key()
                result = self._checked.get(place)
            except (TypeError, AttributeError):
                place = None
        if result is None:
            named = texts()
            result = Checked(named, _digest(task, named))
            if place is not None:
                if len(self._checked) >= _MOST_CHECKED:
                    self._checked.clear()
                self._checked[place] = result
        return result

    def tell(self, refuses: bool, digest: bytes, sizes: Sequence[int]) -> list[tuple]:
        """What all processes say, by rank, each in a tuple of refuses, digest and four sizes. There
        is a group for it by then."""
        _ROW.pack_into(self._row, 0, refuses, digest, *sizes, *_ZEROS[len(sizes) :])
        self._control.allgather(*self._tensors).wait()
        return list(_ROW.iter_unpack(self._rows))


_agreements: WeakKeyDictionary[dist.ProcessGroup, dict[float, Agreement]] = WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup, timeout: float) -> Agreement:
    """That of a group, the same for all communicators of the group with this timeout."""
    by_timeout = _agreements.get(group)
    if by_timeout is None:
        by_timeout = _agreements[group] = {}
    agreement = by_timeout.get(timeout)
    if agreement is None:
        agreement = by_timeout[timeout] = Agreement()
    return agreement


def refused(error: Exception) -> Checked:
    """What a process says whose own checks raise."""
    return Checked({"error": f"{type(error).__name__}: {error}"}, bytes(_DIGEST))


def difference(task: str, says: list[tuple[str, dict[str, str]]]) -> str:
    """A sentence of the first difference between processes, which is the same in all of them."""
    for rank, (_, texts) in enumerate(says):
        if "error" in texts:
            return f"{task}: rank {rank} cannot take part: {texts['error']}"
    first_task, first = says[0]
    for rank, (other, texts) in enumerate(says[1:], 1):
        if other != first_task:
            return f"rank {rank} calls {other} while rank 0 calls {first_task}"
        for name in {**first, **texts}:
            mine, others = (each.get(name, "missing") for each in (first, texts))
            if mine != others:
                return f"{task}: {name} differs: {mine} on rank 0, {others} on rank {rank}"
    return f"{task}: processes differ"  # a collision of digests alone


def _digest(task: str, texts: dict[str, str]) -> bytes:
    lines = "\0".join([task, *(f"{name}={text}" for name, text in texts.items())])
    return hashlib.sha256(lines.encode()).digest()[:_DIGEST]
