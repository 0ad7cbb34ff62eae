"""Matrices laid out for products on a CPU, which are kept: to lay one out takes longer than most
products with it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import torch

from kernlib.families.sparse.layout import untransformed
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.tensors import State, state_of
from kernlib.runtime.dtypes import accumulator

# Of all that is kept; a larger matrix, and the ones that were not used for longest, are laid out
# anew for each product.
MOST_BYTES = 1 << 30


class _Kept(NamedTuple):
    matrix: weakref.ref  # whose end ends this
    state: State  # of the matrix when it was laid out
    dense: torch.Tensor


_kept: OrderedDict[int, _Kept] = OrderedDict()  # by the matrix's id


def laid_out(w: SparseMatrix) -> torch.Tensor:
    """W (R, C) in the dtype of the sums. One on a CPU is kept, 1 GiB in all, until torch counts a
    write to the matrix; not that of tensors of inference mode, whose writes it does not count."""
    wide = accumulator(w.dtype)
    if w.format == "dense" and w.dtype == wide:
        return w.operands[0]
    state = state_of(w) if w.device.type == "cpu" else None
    if state is None:
        return w.to_dense().to(wide)
    found = _kept.get(id(w))
    if found is not None and found.matrix() is w and found.state == state:
        with suppress(KeyError):  # of which another thread made room
            _kept.move_to_end(id(w))
        return found.dense
    # Plain tensors, whatever is active: who asks next may record a gradient.
    with untransformed(), torch.inference_mode(False), torch.no_grad():
        dense = w.to_dense().to(wide)
    _keep(w, state, dense)
    return dense


def _keep(w: SparseMatrix, state: State, dense: torch.Tensor) -> None:
    own = id(w)
    _kept.pop(own, None)
    if dense.nbytes > MOST_BYTES:
        return
    _kept[own] = _Kept(weakref.ref(w, lambda _: _kept.pop(own, None)), state, dense)
    total = sum(each.dense.nbytes for each in tuple(_kept.values()))
    while total > MOST_BYTES and _kept:
        with suppress(KeyError):
            total -= _kept.popitem(last=False)[1].dense.nbytes
