"""The promise that a matrix is not written, and what torch counts of writes.

A product of a frozen matrix may read it before the launch before it on its stream has ended, which
hides the start of a launch. Whatever that launch writes may not be there yet: torch does not count
every write (``.data``, DLPack, storages, collectives, other kernels and replays of graphs pass it
by), so nothing but its owner can know that a matrix is settled, and who has not said so gets
products that wait. What torch does count is compared at each product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernlib.errors import CaptureError
from kernlib.ops.tensors import stand_ins

if TYPE_CHECKING:
    from kernlib.ops.sparse_matrix import SparseMatrix

State = tuple[int, ...]


def state_of(w: SparseMatrix) -> State | None:
    """Where each of the matrix's tensors lies and how often it has been written; None where torch
    does not count: tensors of inference mode, and those without memory."""
    try:
        return tuple([n for t in w._operands for n in (t.data_ptr(), t._version)])
    except RuntimeError:
        return None


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
    object.__setattr__(w, "_frozen", _seen(w))
    object.__setattr__(w, "_key", (*w._key, "frozen"))


def thaw(w: SparseMatrix) -> None:
    """What :meth:`SparseMatrix.thaw` does."""
    object.__setattr__(w, "_key", w._key[:2])
    object.__setattr__(w, "_frozen", None)


def check_frozen(w: SparseMatrix) -> None:
    """Raises RuntimeError for a frozen matrix that was written, as far as torch counts."""
    if _seen(w) != w._frozen:
        raise RuntimeError(
            "w was written or moved after freeze(), and products of a frozen matrix may read it "
            "before that has ended: call w.thaw() before writing its tensors, and w.freeze() after"
        )


def _seen(w: SparseMatrix) -> State:
    """The state, or of tensors of inference mode where they lie."""
    state = state_of(w)
    return tuple([t.data_ptr() for t in w._operands]) if state is None else state


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
