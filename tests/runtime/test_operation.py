"""Plans of operations, with functions that stand for those of a family."""

import re
import struct

import pytest
import torch

import kernlib as kl
from kernlib.runtime.operation import KERNELS, Operation, bind


def test_a_size_that_no_kernel_counts_is_named():
    """A view of very many rows, which takes no memory itself."""
    calls = bind(
        Operation(
            name="counted",
            operators=None,
            key=lambda x: tuple(x.shape),
            check=lambda x: x.shape[0],
            way=lambda call, x: KERNELS,
            reference=None,
            plan=lambda call, x: struct.pack("<I", call),
            launch=lambda plan, x: len(plan),
            tensors=lambda x: (x,),
            materialised=lambda x: None,
        )
    )
    one = torch.zeros(1, 3)
    assert calls.execute(one.expand(1 << 20, 3)) == 4
    for call in (calls.execute, lambda x: calls.make(x.shape[0], x)):
        words = re.escape("counted: tensors of shapes (1099511627776, 3) have more than a kernel")
        with pytest.raises(kl.UnsupportedError, match=words + ".*call it on slices"):
            call(one.expand(1 << 40, 3))
