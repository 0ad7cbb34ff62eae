"""Whether a kernel may read a matrix before the launch before it on its stream has ended.

That hides the start of a launch, 1.3 to 1.7 us, but what the launch before writes may not be there
yet. So the tensors must be as a product found them that did wait: at the same addresses, with the
versions that torch counts, in the same stream. Whatever wrote them had ended before that one began,
and a version that is another says that somebody has written since.

While a CUDA graph is captured, nothing runs. There a product in any stream will do: what was not
written during the capture will have been before the graph's first launch begins, which waits.
"""

from __future__ import annotations

import torch

from kernlib import launch
from kernlib.ops.sparse_matrix import SparseMatrix

STREAMS = 64  # that a matrix knows; past that it begins anew

State = tuple[int, ...]


def state_of(w: SparseMatrix) -> State | None:
    """Where each of the matrix's tensors lies and how often it has been written, None where torch
    does not count: tensors of inference mode."""
    try:
        return tuple([n for t in w._operands for n in (t.data_ptr(), t._version)])
    except RuntimeError:
        return None


def is_settled(w: SparseMatrix, state: State | None, device: int) -> bool:
    """Whether a product on the current stream of a device may read the matrix early."""
    if state is None:
        return False
    known = w._settled
    if known.get(launch.current_stream(device)) == state:
        return True
    return torch.cuda.is_current_stream_capturing() and state in known.values()


def settle(w: SparseMatrix, state: State | None, device: int) -> None:
    """Remember a product that waited, launched on the current stream of a device."""
    if state is None or torch.cuda.is_current_stream_capturing():
        return
    known = w._settled
    if len(known) >= STREAMS:
        known.clear()
    known[launch.current_stream(device)] = state
