"""The tensors of a matrix: their checks when they are loaded, where they lie, the writes to them
that torch counts, and the promise that nothing writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from os import urandom
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from kernlib.descriptors.base import shown
from kernlib.errors import CaptureError
from kernlib.families.sparse.formats.encoding import check_names
from kernlib.families.sparse.layout import (
    DTYPES,
    QUANTISED_VERSION,
    VERSION,
    form_text,
    format_of,
    sizes_as_tensor,
    split,
    untransformed,
)
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.runtime.tensors import check_dense, materialised, overlaps_itself, span, stand_ins

if TYPE_CHECKING:
    from kernlib.families.sparse.matrix import SparseMatrix

# Version 1 held the rows of u8, u4 and u2 as int16, which collectives do not support.
READABLE, QUANTISED_READABLE = (1, VERSION), (QUANTISED_VERSION,)
MOST_BYTES = 2**63 - 1  # of the dense matrix, as torch counts them
ALIGNMENT = 16  # of each tensor's first address: kernels read by 16 bytes
# Attributes of tensors. MARK: a number that the tensors of a matrix share, their layout, and the
# place and version that were checked, or None. TURNED, of a first tensor: the states in which its
# matrix is another's transpose.
MARK, TURNED = "_kernlib_matrix", "_kernlib_turned"
next_mark = count(int.from_bytes(urandom(6), "little") << 16).__next__  # unlike other processes'
LIVE: WeakValueDictionary[int, SparseMatrix] = WeakValueDictionary()  # matrices by their numbers
PLACES: WeakValueDictionary[int, SparseMatrix] = WeakValueDictionary()  # by first addresses

State = tuple[int, ...]
# One tensor of bytes that holds several, and the dtype, shape and first byte of each in it.
Memory = tuple[torch.Tensor, tuple[tuple[torch.dtype, tuple[int, ...], int], ...]]


def placed(t: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels read it: contiguous, with an aligned first address, without a gradient,
    and with its values in memory. A copy if need be."""
    t = materialised(t.detach()).contiguous()
    if t.is_meta or stand_ins(t) or t.data_ptr() % ALIGNMENT == 0:
        return t
    return t.clone()


# Loading. Whatever bytes a state holds, it is checked before anything addresses memory by it:
# sizes, facts, places and steps, so that no kernel reads or writes beyond the tensors. Values may
# be any.


def checked_header(header: Mapping[str, object]) -> dict:
    """A header whose values have been checked and converted to plain types. Raises ValueError, and
    TypeError for what is no mapping."""
    if not isinstance(header, Mapping):
        raise TypeError(
            "header must be a dict, the first of what SparseMatrix.state() gives, got "
            f"{type(header).__name__}"
        )
    names = ("format", "version", "shape", "dtype", "nnz", "facts")
    missing = [name for name in names if name not in header]
    if missing:
        raise ValueError(
            f"header of a SparseMatrix lacks {', '.join(missing)}: pass what state() gives"
        )
    fields = {name: header[name] for name in names}
    _check_names_of(fields)
    shape = _integers("shape", fields["shape"])
    if len(shape) != 2:
        raise ValueError(f"shape must be (rows, columns), got {fields['shape']!r}")
    if max(1, shape[0]) * max(1, shape[1]) * DTYPES[fields["dtype"]].itemsize > MOST_BYTES:
        raise ValueError(f"shape must be that of at most {MOST_BYTES} bytes, got {shape}")
    if not isinstance(fields["facts"], Mapping):
        raise ValueError(f"facts must be a dict of ints, got {shown(fields['facts'])}")
    facts = dict(zip(fields["facts"], _integers("facts", fields["facts"].values()), strict=True))
    (nnz,) = _integers("nnz", [fields["nnz"]])
    if nnz > shape[0] * shape[1]:
        raise ValueError(f"nnz must be at most {shape[0]} * {shape[1]}, got {shown(nnz)}")
    return {**fields, "shape": shape, "facts": facts, "nnz": nnz}


def _check_names_of(fields: Mapping[str, object]) -> None:
    """Raises ValueError for a version, format or dtype that is not known."""
    version, format, dtype = (fields[name] for name in ("version", "format", "dtype"))
    readable = QUANTISED_READABLE if isinstance(format, str) and format in QUANTISED else READABLE
    if type(version) is not int or version not in readable:
        versions = " and ".join(map(str, readable))
        raise ValueError(
            f"header is of version {shown(version)}, this kernlib reads version"
            f"{'s' * (len(readable) > 1)} {versions} of such a format: compress the matrix again"
        )
    format_of(format)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")


def _integers(name: str, values) -> tuple[int, ...]:
    """Raises ValueError unless all are ints of at least 0."""
    try:
        numbers = tuple(values)
    except TypeError:
        raise ValueError(f"{name} must hold ints, got {shown(values)}") from None
    for value in numbers:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must hold ints of at least 0, got {shown(value)}")
    return numbers


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
    codec = format_of(format)
    if not isinstance(tensors, Mapping):
        raise TypeError(
            "tensors must be a dict, the second of what SparseMatrix.state() gives, got "
            f"{type(tensors).__name__}"
        )
    check_names(format, tensors, codec.TENSORS)
    check_dense(codec.TENSORS, **tensors)
    for name, tensor in tensors.items():
        check_whole(name, tensor)
    if all(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("the tensors of a state are on meta, without values: load those that are")
    operands = {name: placed(tensor) for name, tensor in tensors.items()}
    rows = operands.get("rows")
    if rows is not None and rows.dtype == torch.int16:
        operands["rows"] = placed(rows.view(torch.uint8))
    codec.check(operands, facts, shape, dtype)
    return operands


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


# Addresses of tensors. Tensors that have moved since a product last used them are checked again,
# which waits for the device.


def mark(w: SparseMatrix) -> None:
    """Mark the tensors of a matrix. A program that holds only the tensors can then find the matrix,
    or knows that they fit the layout. They are also marked as by
    ``torch._dynamo.mark_static_address``, whose call would load Dynamo: then CUDA graphs of
    compiled code read the matrix in place, and do not copy it."""
    tag = (next_mark(), w._layout, None)
    joined = joined_of(w)
    tensors = w._operands if joined is None else (joined,)
    with torch.inference_mode(False), untransformed():
        sizes = sizes_as_tensor(w._shape, w._facts, w._device)
    for t in {*w._operands, *tensors}:
        setattr(t, MARK, tag)
    for t in (*w._operands, *tensors, sizes):
        t._dynamo_static_input_type = "unguarded"
    object.__setattr__(w, "_listed", (*tensors, sizes))
    object.__setattr__(w, "_form", form_text(w._layout, joined is not None))
    LIVE[tag[0]] = w
    if not stand_ins(*w._operands):
        addresses = [t.data_ptr() for t in w._operands]
        object.__setattr__(w, "_addresses", addresses)  # where kernels can read them
        if addresses[0]:
            PLACES[addresses[0]] = w


def joined_of(w: SparseMatrix) -> torch.Tensor | None:
    """The tensor that holds those of a matrix, if one does so as its format's ``split`` says. An
    operator takes one tensor then: each has guards of its own in a compiled program."""
    format = format_of(w._format)
    if not hasattr(format, "joined") or stand_ins(*w._operands) or w._device.type == "meta":
        return None
    return format.joined(w._operands, w._facts, w._shape)


def memory_of(w: SparseMatrix) -> torch.Tensor | Memory | None:
    """What pickles hold in place of the tensors of a matrix if these are views of one storage:
    the tensor that :func:`joined_of` answers, or their memory. torch.save takes no views of several
    dtypes of one storage, and pickle writes a storage once for each. None for tensors with memory
    of their own, and for those without values."""
    joined = joined_of(w)
    operands = w._operands
    if joined is not None or len(operands) < 2 or stand_ins(*operands) or w._device.type == "meta":
        return joined
    if len({t.untyped_storage().data_ptr() for t in operands}) > 1:
        return None
    if not all(t.is_contiguous() for t in operands):
        return None
    starts = [t.storage_offset() * t.element_size() for t in operands]
    sizes = [t.numel() * t.element_size() for t in operands]
    first, end = min(starts), max(map(sum, zip(starts, sizes, strict=True)))
    data = operands[0].view(-1).view(torch.uint8).as_strided((end - first,), (1,), first).detach()
    places = ((t.dtype, tuple(t.shape), s - first) for t, s in zip(operands, starts, strict=True))
    return data, tuple(places)


def tensors_in(layout: str, memory: torch.Tensor | Memory) -> tuple[torch.Tensor, ...]:
    """The tensors of a layout's matrix, in order, of which :func:`memory_of` answered this. They
    are not checked. Raises ValueError for places that are not in the memory."""
    if isinstance(memory, torch.Tensor):
        return split(layout, memory)
    try:
        data, places = memory
        check_dense(("memory",), memory=data)
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"memory is {data.dtype} of shape {tuple(data.shape)}")
        return tuple(_view(data, *place) for place in places)
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the tensors of a matrix must lie in its memory: {error}") from error


def _view(
    data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], start: int
) -> torch.Tensor:
    end = start + math.prod(shape) * dtype.itemsize
    return data[start:end].view(dtype).view(shape)


def state_of(w: SparseMatrix) -> State | None:
    """The address of each of the matrix's tensors, and how often torch has counted a write to it.
    None where torch does not count: for tensors of inference mode, and for those without memory."""
    try:
        return tuple([n for t in w._operands for n in (t.data_ptr(), t._version)])
    except RuntimeError:
        return None


def settle(w: SparseMatrix) -> None:
    """Wait for what this stream makes of a matrix: it is kept, and other streams, which find it
    there and know nothing of this one, may read it as soon as it is."""
    if w._device.type == "cuda":
        torch.cuda.current_stream(w._device).synchronize()


def check_place(w: SparseMatrix, addresses: list[int]) -> None:
    """Check tensors that are not at the addresses where they were checked before, and note the new
    addresses. Raises ValueError for tensors that kernels cannot read, and for those of another
    matrix; CaptureError while a CUDA graph is captured, if they need a check that waits for the
    device."""
    if addresses == w._addresses:
        return
    for index, (address, tensor) in enumerate(zip(addresses, w._operands, strict=True)):
        if address % ALIGNMENT or not tensor.is_contiguous():
            place = f"w.tensors[{[*w.tensors][index]!r}]"
            raise ValueError(
                f"{place} must be contiguous and begin at whole {ALIGNMENT} bytes of memory, got "
                f"address {address:#x} and strides {tensor.stride()}: give it memory of its own, "
                f"{place}.data = {place}.clone()"
            )
    if w._addresses is not None:
        check_written(w)
    object.__setattr__(w, "_addresses", addresses)


def check_written(w: SparseMatrix) -> None:
    """Check tensors that were written or have moved. Raises ValueError for what is no matrix of the
    layout, CaptureError while a CUDA graph is captured."""
    refuse_capture(w.operands)
    with said_of(w.layout):
        facts = {**w.facts, **measured(w.format, w.tensors)}
        format_of(w.format).check(w.tensors, facts, w.shape, w.dtype)
    if facts != w.facts:
        raise ValueError(
            f"the tensors of w were written or lie elsewhere now, and are those of another matrix: "
            f"{facts} for {dict(w.facts)}; make it anew, by SparseMatrix.from_state"
        )


@contextmanager
def said_of(layout: str) -> Iterator[None]:
    """A context that adds the expected layout to errors of a check."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # RuntimeError is torch's own, for odd tensors
        kind = " ".join(kind_of(layout))
        raise ValueError(f"these tensors are no matrix of kind {kind!r}: {error}") from error


def measured(format: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The facts of a matrix as its tensors have them. For u8, u4 and u2 there are none: their width
    cannot be found in the tensors."""
    if format == "bitmap" or format in QUANTISED:
        units = tensors["offsets"].long().diff()
        return {"largest": 16 * int(units.max()) if units.numel() else 0}
    if format == "macko":
        entries = int(torch.count_nonzero(tensors["values"]))
        return format_of(format).facts_of(tensors["row_ptr"], entries)
    return {}


def kind_of(layout: str) -> list[str]:
    """Format, shape and dtype of a layout, as text."""
    return layout.split(" ")[:3]


def refuse_capture(tensors: Sequence[torch.Tensor]) -> None:
    """Raises CaptureError while a CUDA graph is captured."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "these tensors of a compressed matrix are not those it was made of, and have not been "
            "checked, which waits for the device: make the same call once before the capture"
        )


# The promise that nothing writes them. A product with a frozen matrix may read the matrix before
# the previous launch on its stream has ended, which hides the start of a launch. What that launch
# writes may not be there yet. Torch does not count every write: not those by .data, DLPack,
# storages, collectives, other kernels and replays of graphs. So only the owner of a matrix can know
# that nothing writes it any more. Unless the owner says so, by freezing it, products wait. The
# writes that torch counts are compared at each product.


def freeze(w: SparseMatrix) -> None:
    """Does what ``SparseMatrix.freeze`` says. Raises ValueError for fake tensors, CaptureError
    while a CUDA graph is captured, and what :func:`check_frozen` raises."""
    if w._frozen is not None:
        check_frozen(w)
        return
    if stand_ins(*w._operands):
        raise ValueError("w has no values here to freeze (fake tensors): freeze it outside")
    if w._device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "freeze() waits for the device, which cannot be while a CUDA graph is captured: "
                "call it before the capture"
            )
        torch.cuda.synchronize(w._device)  # so that all earlier writes of the matrix have ended
    state = state_of(w)
    object.__setattr__(w, "_frozen", _places(w) if state is None else state)
    object.__setattr__(w, "_key", (*w._key, "frozen"))


def thaw(w: SparseMatrix) -> None:
    """Does what ``SparseMatrix.thaw`` says."""
    object.__setattr__(w, "_key", w._key[:2])
    object.__setattr__(w, "_frozen", None)


def check_frozen(w: SparseMatrix) -> None:
    """Raises RuntimeError for a frozen matrix that was moved, or written as far as torch counts."""
    state = state_of(w)
    if state != w._frozen and (state is not None or _places(w) != w._frozen):
        raise RuntimeError(
            "w was written or moved after freeze(), and products of a frozen matrix may read it "
            "before that has ended: call w.thaw() before writing its tensors, and w.freeze() after"
        )


def _places(w: SparseMatrix) -> State:
    """The addresses of a matrix's tensors: the only state of tensors of inference mode."""
    return tuple([t.data_ptr() for t in w._operands])


def check_unwritten(w: SparseMatrix, state: State | None) -> None:
    """Raises RuntimeError for a matrix that was written since it was in this state, between a
    product and its gradient. Torch does the same for tensors that it saves."""
    now = state_of(w)
    if now != state and now is not None and state is not None:
        index = next(i for i, pair in enumerate(zip(now, state, strict=True)) if len({*pair}) > 1)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: w.tensors[{[*w.tensors][index // 2]!r}] of a SparseMatrix was written or "
            "moved between the product and its gradient"
        )
