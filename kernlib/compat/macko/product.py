"""The product of a matrix in MACKO's format and one vector on a GPU, for callers that know the
matrix's tensors and no facts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernlib.families.sparse.formats import macko as codec
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem, facts_of
from kernlib.lowering.steps import Lowered
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.sequence import Steps, StepsCache
from kernlib.runtime.tensors import materialised

PADDED = 8  # elements, to a multiple of which kernels read a vector

_plans = StepsCache()


def product(
    tensors: Sequence[torch.Tensor], shape: tuple[int, int], x: torch.Tensor
) -> torch.Tensor:
    """``W x`` (R,) of the ``codec.TENSORS`` of a matrix (R, C) with int32 rows and a checked vector
    (C,) of any stride and of its dtype, without a synchronisation."""
    rows, columns = shape
    if not tensors[0].numel() or not x.numel():
        return x.new_zeros((rows,))
    matrix = [_readable(tensor) for tensor in tensors]
    x = materialised(x)
    if columns % PADDED or x.stride(0) != 1 or x.data_ptr() % 16:
        x = torch.nn.functional.pad(x.clone(), (0, -columns % PADDED))
    out = x.new_empty((rows,))
    plan = _plan(tensors[0], rows, columns)
    plan.launch([tensor.data_ptr() for tensor in (*matrix, x, out)])
    return out


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that kernels cannot read as it lies."""
    address = tensor.data_ptr()  # 0 of a zero tensor, which has no memory
    if address and address % 16 == 0 and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return materialised(tensor).clone(memory_format=torch.contiguous_format)


def _plan(values: torch.Tensor, rows: int, columns: int) -> Steps:
    """The launches. How unequal rows are is not known: they count as equal, and take longer where
    they are not."""
    entries, device = values.numel(), values.device

    def lower() -> Lowered:
        per_row = -(-entries // rows)
        facts = {"entries": entries, "longest": per_row, "busiest": per_row * codec.BLOCK}
        dtype = str(values.dtype).removeprefix("torch.")
        padded = -(-columns // PADDED) * PADDED
        sizes = rows, columns, 1, dtype, padded, True, (rows, 1)
        problem = Problem(*sizes, facts_of(facts), codec.FORMAT)
        index = device.index
        return choose.lower((), problem, arch_of(index), model(index).multiprocessors)

    key, operands = (entries, rows, columns, values.dtype), (*codec.TENSORS, "x", "out")
    return _plans.of(key, operands, device, lower)
