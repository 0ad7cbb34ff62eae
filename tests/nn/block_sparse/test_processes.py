"""Layouts, matrices and layers as arguments of processes that begin anew."""

import pytest
import torch
import torch.multiprocessing

from kernlib import sparse
from kernlib.blocksparse import Layout
from kernlib.compat import torch_blocksparse
from kernlib.nn import (
    BlockSparseConv2d,
    BlockSparseLinear,
    BlockSparseMultiheadAttention,
    SparseLinear,
)
from tests.support.limits import LIMIT_S

METHODS = ("spawn", "forkserver")


def shown(value):
    """Plain values that say what an argument holds."""
    if isinstance(value, Layout):
        return value.text, value.mask().tolist()
    if isinstance(value, sparse.SparseMatrix):
        return value.layout, value.to_dense().tolist()
    parameters = [p.tolist() for p in getattr(value, "parameters", list)()]
    layout = getattr(value, "layout", None)
    return parameters, shown(layout) if isinstance(layout, Layout) else str(layout)


def compare(values, expected):
    assert [shown(value) for value in values] == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_process_gets_layouts_and_layers_as_its_arguments(method):
    mask = torch.eye(4, dtype=torch.bool)
    layout = Layout(mask, 16)
    values = (
        layout,
        BlockSparseLinear(64, 64, layout),
        BlockSparseConv2d(16, 16, 3, layout=16, density=0.5),
        BlockSparseMultiheadAttention(32, 2, layout),
        torch_blocksparse.Softmax(mask.long()[None], 16),
        SparseLinear.from_linear(torch.nn.Linear(20, 10), density=0.3),
        sparse.compress(torch.eye(20)),
    )
    expected = [shown(value) for value in values]
    context = torch.multiprocessing.get_context(method)
    process = context.Process(target=compare, args=(values, expected))
    process.start()
    layout.update_(mask.flip(0))  # which the process does not see
    process.join(LIMIT_S)
    process.kill()  # else the end of pytest waits for one that hangs
    assert process.exitcode == 0
