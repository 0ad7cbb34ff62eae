"""Safetensors files, written tensor by tensor, where that library's own function takes a dictionary
of all tensors and so all of their memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from kernlib.checkpoints.files import DTYPES, fault

ALIGNMENT = 64  # of the first byte behind the header: packed matrices are read where they lie
PART = ".part"  # behind the name of a file that is not whole
PIECE = 1 << 25  # bytes of a GPU's tensor that are written at a time
DIGITS = 15  # of the largest offset and size that the header has room for
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


class Shard:
    """A safetensors file on its way: ``FILE.part`` until :meth:`close`, which gives it its name.

    The header, which comes first in the file, says where tensors lie, and sizes of compressed ones
    are known last: it is written last, into room that was left for it, and filled up with blanks as
    the format permits. ``names`` are all that :meth:`add` may be called with, at most ``dims``
    dimensions each.
    """

    def __init__(
        self,
        path: Path,
        names: Iterable[str],
        dims: int,
        metadata: Mapping[str, str] | None = None,
    ):
        self.path, self.nbytes = path, 0
        self._pinned: torch.Tensor | None = None
        self._part = path.with_name(path.name + PART)
        self._entries: dict[str, dict] = {}
        if metadata:
            self._entries["__metadata__"] = dict(metadata)
        most = 10**DIGITS
        longest = {
            name: {"dtype": "F8_E4M3", "shape": [most] * dims, "data_offsets": [most, most]}
            for name in names
        }
        text = _json({**self._entries, **longest})
        self._room = -(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8
        self._file = self._part.open("wb")
        self._file.seek(8 + self._room)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor. Raises CheckpointError for a dtype that the format does not have."""
        if tensor.dtype not in KINDS:
            raise fault(self.path, f"files of safetensors hold no {tensor.dtype}", name)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        data = tensor.contiguous().view(-1).view(torch.uint8)
        end = self.nbytes + data.numel()
        self._entries[name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [self.nbytes, end],
        }
        for some in data.split(PIECE) if data.is_cuda else (data,):
            self._file.write(self._on_host(some).numpy().data)
        self.nbytes = end

    def _on_host(self, data: torch.Tensor) -> torch.Tensor:
        """Bytes of a GPU in memory that it writes to directly, the same for all of them."""
        if not data.is_cuda:
            return data
        if self._pinned is None:
            self._pinned = torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._pinned[: data.numel()].copy_(data)

    def close(self) -> None:
        """Write the header, and give the file its name."""
        text = _json(self._entries)
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
        self._file.close()
        os.replace(self._part, self.path)

    def drop(self) -> None:
        """Remove what has been written."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def _json(value: dict) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step: it is there whole or not at all."""
    part = path.with_name(path.name + PART)
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
