"""A compressed matrix as one tensor of bytes: its header and its tensors behind each other.

Loaders that fill a module tensor by tensor know tensors by names. A matrix has others in each
format, of sizes that depend on what is stored; one tensor has one name, and loaders cast no bytes.
"""

from __future__ import annotations

import json
import math

import torch

from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.tensors import check_whole, checked_header
from kernlib.runtime.tensors import materialised

MAGIC = b"kernlib\x01"
ALIGNMENT = 64  # of each tensor's first byte
LONGEST = 4096  # bytes of a header
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32,
    )
}  # fmt: skip
_START = len(MAGIC) + 8  # of the header, behind its length
LONGEST_HEAD = _START + LONGEST  # first bytes, in which a header ends


def packed(matrix: SparseMatrix) -> torch.Tensor:
    """The bytes (n,) of a matrix on its device, uint8, a copy. Waits for the device if ``nnz`` has
    not been counted."""
    header, tensors = matrix._header(), matrix.tensors  # of state() copies would be copied again
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = [str(tensor.dtype).removeprefix("torch."), [*tensor.shape], end]
        end += _rounded_up(tensor.numel() * tensor.element_size())
    text = json.dumps({**header, "tensors": places}, sort_keys=True).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    head = head.ljust(_rounded_up(len(head)), b"\0")
    result = torch.zeros(len(head) + end, dtype=torch.uint8, device=matrix.device)
    result[: len(head)] = torch.tensor(list(head), dtype=torch.uint8, device="cpu")
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8)
        start = len(head) + places[name][2]
        result[start : start + data.numel()] = data
    return result


def unpacked(data: torch.Tensor) -> SparseMatrix:
    """The matrix of such bytes, whose memory it shares if that is aligned. Its tensors are checked
    as :meth:`SparseMatrix.from_state` does, which waits for the device. Raises ValueError."""
    check_bytes(data)
    data = materialised(data.detach()).contiguous()
    if data.data_ptr() % ALIGNMENT or data.storage_offset() % ALIGNMENT:
        data = data.clone()
    header, start = _header(data)
    places = header.pop("tensors", None)
    if not isinstance(places, dict):
        raise ValueError("the header of a packed matrix has no places of tensors")
    tensors = {name: _tensor(name, place, data[start:]) for name, place in places.items()}
    return SparseMatrix.from_state(header, tensors)


def header_of(data: torch.Tensor) -> dict:
    """The header of such bytes, or of the first ``LONGEST_HEAD`` of them, checked, which says
    format, shape and dtype of the matrix. Reads no more than its own bytes. Raises ValueError."""
    check_bytes(data)
    return checked_header(_header(data)[0])


def check_bytes(data: object) -> None:
    """Raises ValueError for what cannot be the bytes of a matrix."""
    if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or data.dim() != 1:
        kind = type(data).__name__
        if isinstance(data, torch.Tensor):
            kind = f"{data.dtype} of shape {tuple(data.shape)}"
        raise ValueError(f"a packed matrix is a tensor (n,) of uint8, got {kind}")
    if data.is_meta:
        raise ValueError("a packed matrix on meta has no values: load one that has")
    check_whole("a packed matrix", data)


def _header(data: torch.Tensor) -> tuple[dict, int]:
    """The header, and where the tensors begin. Raises ValueError."""
    first = bytes(data[:_START].tolist())
    if not first.startswith(MAGIC) or len(first) < _START:
        raise ValueError("these bytes do not begin as a packed matrix does: they are of another")
    size = int.from_bytes(first[len(MAGIC) :], "little")
    if size > min(LONGEST, data.numel() - _START):
        raise ValueError(f"the header of a packed matrix must end within it, got {size} bytes")
    try:
        header = json.loads(bytes(data[_START : _START + size].tolist()).decode())
    except (RecursionError, ValueError):
        raise ValueError("the header of a packed matrix is damaged") from None
    if not isinstance(header, dict):
        raise ValueError("the header of a packed matrix must be a mapping")
    return header, _rounded_up(_START + size)


def _tensor(name: str, place: object, data: torch.Tensor) -> torch.Tensor:
    """One of the tensors. Raises ValueError for a place that is none."""
    try:
        kind, shape, start = place
        dtype = _DTYPES[kind]
        sizes = [*shape, start]
        if any(type(size) is not int or not 0 <= size <= data.numel() for size in sizes):
            raise ValueError
        end = start + math.prod(shape) * dtype.itemsize
        if end > data.numel() or start % ALIGNMENT:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{name} of a packed matrix must lie in its {data.numel()} bytes, got {place!r}"[:300]
        ) from None
    return data[start:end].view(dtype).view(shape)


def _rounded_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
