"""States of compressed matrices, as they are saved and loaded. Whatever bytes a state holds, it is
checked before anything addresses memory by it.

All loading goes through :func:`loaded`: ``SparseMatrix.from_state``, pickles, and the loading of
``SparseLinear``. It checks sizes, facts, places and steps, so that no kernel reads or writes beyond
the tensors. Values may be any.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernlib.descriptors.base import shown
from kernlib.families.sparse.formats.encoding import check_names
from kernlib.families.sparse.layout import DTYPES, VERSION, format_of
from kernlib.families.sparse.tensors import placed
from kernlib.runtime.tensors import check_dense, overlaps_itself, span, stand_ins

# Version 1 held the rows of u8, u4 and u2 as int16, which collectives do not support.
READABLE = (1, VERSION)
MOST_BYTES = 2**63 - 1  # of the dense matrix, as torch counts them


def checked_header(header: Mapping[str, object]) -> dict:
    """A header whose values have been checked and converted to plain types. Raises ValueError, and
    TypeError for what is no mapping."""
    if not isinstance(header, Mapping):
        raise TypeError(
            "header must be a dict, the first of what SparseMatrix.state() gives, got "
            f"{type(header).__name__}"
        )
    wanted = ("format", "version", "shape", "dtype", "nnz", "facts")
    missing = [name for name in wanted if name not in header]
    if missing:
        raise ValueError(
            f"header of a SparseMatrix lacks {', '.join(missing)}: pass what state() gives"
        )
    given = {name: header[name] for name in wanted}
    _check_names_of(given)
    shape = _integers("shape", given["shape"])
    if len(shape) != 2:
        raise ValueError(f"shape must be (rows, columns), got {given['shape']!r}")
    if max(1, shape[0]) * max(1, shape[1]) * DTYPES[given["dtype"]].itemsize > MOST_BYTES:
        raise ValueError(f"shape must be that of at most {MOST_BYTES} bytes, got {shape}")
    if not isinstance(given["facts"], Mapping):
        raise ValueError(f"facts must be a dict of ints, got {shown(given['facts'])}")
    facts = dict(zip(given["facts"], _integers("facts", given["facts"].values()), strict=True))
    (nnz,) = _integers("nnz", [given["nnz"]])
    if nnz > shape[0] * shape[1]:
        raise ValueError(f"nnz must be at most {shape[0]} * {shape[1]}, got {shown(nnz)}")
    return {**given, "shape": shape, "facts": facts, "nnz": nnz}


def _check_names_of(given: Mapping[str, object]) -> None:
    """Raises ValueError for a version, format or dtype that is not known."""
    version, format, dtype = (given[name] for name in ("version", "format", "dtype"))
    if type(version) is not int or version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise ValueError(
            f"header is of version {shown(version)}, this kernlib reads versions {known}: compress "
            "the matrix again"
        )
    format_of(format)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")


def _integers(name: str, values) -> tuple[int, ...]:
    """Raises ValueError unless all are ints of at least 0."""
    try:
        found = tuple(values)
    except TypeError:
        raise ValueError(f"{name} must hold ints, got {shown(values)}") from None
    for value in found:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must hold ints of at least 0, got {shown(value)}")
    return found


def loaded(
    format: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    facts: Mapping[str, int],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The tensors of a state as kernels read them, in the layout of this version. Their content is
    checked, which waits for the device. Raises ValueError that names the tensor and what is wrong,
    TypeError for what is no dense tensor."""
    known = format_of(format)
    if not isinstance(tensors, Mapping):
        raise TypeError(
            "tensors must be a dict, the second of what SparseMatrix.state() gives, got "
            f"{type(tensors).__name__}"
        )
    check_names(format, tensors, known.TENSORS)
    check_dense(known.TENSORS, **tensors)
    for name, tensor in tensors.items():
        check_whole(name, tensor)
    if all(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("the tensors of a state are on meta, without values: load those that are")
    found = {name: placed(tensor) for name, tensor in tensors.items()}
    rows = found.get("rows")
    if rows is not None and rows.dtype == torch.int16:
        found["rows"] = placed(rows.view(torch.uint8))
    known.check(found, facts, shape, dtype)
    return found


def check_whole(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless each element of a dense tensor has memory of its own."""
    if stand_ins(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError(
            f"{name} has no values here to look at (a fake tensor, or one inside a transform of "
            "torch.func): load outside"
        )
    if overlaps_itself(tensor):  # a copy of it might be far larger than its memory
        raise ValueError(
            f"{name} must have memory for each of its elements, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    reach = tensor.storage_offset() * tensor.element_size() + span(tensor)
    if not tensor._is_zerotensor() and tensor.untyped_storage().nbytes() < reach:
        raise ValueError(f"{name} has no memory: its storage has been freed or cut")
