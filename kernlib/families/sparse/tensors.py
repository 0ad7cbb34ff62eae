"""The tensors of a matrix: where they lie, the writes to them that torch counts, and the promise
that nothing writes them.

A product with a frozen matrix may read the matrix before the previous launch on its stream has
ended, which hides the start of a launch. What that launch writes may not be there yet. Torch does
not count every write: not those by ``.data``, DLPack, storages, collectives, other kernels and
replays of graphs. So only the owner of a matrix can know that nothing writes it any more. Unless
the owner says so, by freezing it, products wait. The writes that torch counts are compared at each
product.
"""

from __future__ import annotations

from itertools import count
from os import urandom
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from kernlib.errors import CaptureError
from kernlib.families.sparse.layout import form_text, sizes_as_tensors, untransformed
from kernlib.runtime.tensors import materialised, stand_ins

if TYPE_CHECKING:
    from kernlib.families.sparse.matrix import SparseMatrix

ALIGNMENT = 16  # of each tensor's first address: kernels read by 16 bytes
# Attributes of tensors. MARK: a number that the tensors of a matrix share, their layout, and the
# place and version that were checked, or None. TURNED, of a first tensor: the states in which its
# matrix is another's transpose.
MARK, TURNED = "_kernlib_matrix", "_kernlib_turned"
next_mark = count(int.from_bytes(urandom(6), "little") << 16).__next__  # unlike other processes'
LIVE: WeakValueDictionary[int, SparseMatrix] = WeakValueDictionary()  # matrices by their numbers
PLACES: WeakValueDictionary[int, SparseMatrix] = WeakValueDictionary()  # by first addresses

State = tuple[int, ...]


def placed(t: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels read it: contiguous, with an aligned first address, without a gradient,
    and with its values in memory. A copy if need be."""
    t = materialised(t.detach()).contiguous()
    if t.is_meta or stand_ins(t) or t.data_ptr() % ALIGNMENT == 0:
        return t
    return t.clone()


def mark(w: SparseMatrix) -> None:
    """Mark the tensors of a matrix. A program that holds only the tensors can then find the matrix,
    or knows that they fit the layout. They are also marked as by
    ``torch._dynamo.mark_static_address``, whose call would load Dynamo: then CUDA graphs of
    compiled code read the matrix in place, and do not copy it."""
    made = (next_mark(), w._layout, None)
    for t in w._operands:
        setattr(t, MARK, made)
    with torch.inference_mode(False), untransformed():
        sizes = sizes_as_tensors(w._shape, w._facts, w._device)
    for t in (*w._operands, *sizes):
        t._dynamo_static_input_type = "unguarded"
    object.__setattr__(w, "_sizes", sizes)
    object.__setattr__(w, "_form", form_text(w._layout))
    LIVE[made[0]] = w
    if not stand_ins(*w._operands):
        addresses = [t.data_ptr() for t in w._operands]
        object.__setattr__(w, "_addresses", addresses)  # where kernels can read them
        if addresses[0]:
            PLACES[addresses[0]] = w


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
    """The addresses of a matrix's tensors: all that is known of those of inference mode."""
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
