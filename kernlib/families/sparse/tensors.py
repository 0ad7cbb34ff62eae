"""The tensors of a matrix: where they lie, what torch counts of writes to them, and the promise
that nobody writes them.

A product of a frozen matrix may read it before the launch before it on its stream has ended, which
hides the start of a launch. Whatever that launch writes may not be there yet: torch does not count
every write (``.data``, DLPack, storages, collectives, other kernels and replays of graphs pass it
by), so nothing but its owner can know that a matrix is settled, and who has not said so gets
products that wait. What torch does count is compared at each product.
"""

from __future__ import annotations

from itertools import count
from os import urandom
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from kernlib.errors import CaptureError
from kernlib.runtime.tensors import materialised, stand_ins

if TYPE_CHECKING:
    from kernlib.families.sparse.matrix import SparseMatrix

ALIGNMENT = 16  # of each tensor's first address: kernels read by 16 bytes
MARK = "_kernlib_matrix"  # of tensors that fit one another: a number, their layout, place, version
TURNED = "_kernlib_turned"  # of a first tensor: states in which its matrix is another's transpose
next_mark = count(int.from_bytes(urandom(6), "little") << 16).__next__  # unlike other processes'
LIVE: WeakValueDictionary[int, SparseMatrix] = WeakValueDictionary()  # matrices by their numbers
PLACES: WeakValueDictionary[int, SparseMatrix] = WeakValueDictionary()  # by first addresses

State = tuple[int, ...]


def placed(t: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels read it: contiguous, its first address aligned, without a gradient, its
    values in memory."""
    t = materialised(t.detach()).contiguous()
    if t.is_meta or stand_ins(t) or t.data_ptr() % ALIGNMENT == 0:
        return t
    return t.clone()


def mark(w: SparseMatrix) -> None:
    """Mark the tensors of a matrix as those: a program that holds nothing else finds it by them, or
    knows that they fit the layout. And as by ``torch._dynamo.mark_static_address``, which would
    load Dynamo: CUDA graphs of compiled code read a matrix where it is, and copy it into no place
    of theirs."""
    made = (next_mark(), w._layout, None)
    for t in w._operands:
        setattr(t, MARK, made)
        t._dynamo_static_input_type = "unguarded"
    LIVE[made[0]] = w
    if not stand_ins(*w._operands):
        addresses = [t.data_ptr() for t in w._operands]
        object.__setattr__(w, "_addresses", addresses)  # where kernels can read them
        if addresses[0]:
            PLACES[addresses[0]] = w


def state_of(w: SparseMatrix) -> State | None:
    """Where each of the matrix's tensors lies and how often it has been written; None where torch
    does not count: tensors of inference mode, and those without memory."""
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
    """What :meth:`SparseMatrix.freeze` does."""
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
        torch.cuda.synchronize(w._device)  # whatever wrote the matrix has ended then
    state = state_of(w)
    object.__setattr__(w, "_frozen", _places(w) if state is None else state)
    object.__setattr__(w, "_key", (*w._key, "frozen"))


def thaw(w: SparseMatrix) -> None:
    """What :meth:`SparseMatrix.thaw` does."""
    object.__setattr__(w, "_key", w._key[:2])
    object.__setattr__(w, "_frozen", None)


def check_frozen(w: SparseMatrix) -> None:
    """Raises RuntimeError for a frozen matrix that was written, as far as torch counts."""
    state = state_of(w)
    if state != w._frozen and (state is not None or _places(w) != w._frozen):
        raise RuntimeError(
            "w was written or moved after freeze(), and products of a frozen matrix may read it "
            "before that has ended: call w.thaw() before writing its tensors, and w.freeze() after"
        )


def _places(w: SparseMatrix) -> State:
    """What can be seen of tensors of inference mode: where they lie."""
    return tuple([t.data_ptr() for t in w._operands])


def check_unwritten(w: SparseMatrix, state: State | None) -> None:
    """Raises RuntimeError, as torch does for tensors that it saves, for a matrix that was written
    since it was in this state: between a product and its gradient."""
    now = state_of(w)
    if now != state and now is not None and state is not None:
        index = next(i for i, pair in enumerate(zip(now, state, strict=True)) if len({*pair}) > 1)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: w.tensors[{[*w.tensors][index // 2]!r}] of a SparseMatrix was written or "
            "moved between the product and its gradient"
        )
