"""What is wrong with a scaled product is said by the name of the argument."""

import pickle
import re

import pytest
import torch

from kernlib.descriptors.text import from_text, to_text
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.scaled.functions import quantize, scaled_dds
from kernlib.run import run_kernel
from tests.families.blocksparse.scaled.cases import F8, layout

MADE = layout([[1, 0, 1], [0, 1, 0]], (16, 32), 1)  # (32, 96), 4 slots
LAYER = BlockSparseScaledMatmul("dds", transpose_b=True)
A, VALUES = torch.zeros(5, 96, dtype=F8), torch.zeros(4, 16, 32, dtype=F8)
GIVEN = {"a": A, "values": VALUES, "scale_a": torch.ones(5), "scale_b": torch.ones(4)}

DESCRIPTORS = {
    "mode must be one of ('dsd', 'dds'), got 'sdd'": {"mode": "sdd"},
    "transpose_a must be a bool, got 1": {"mode": "dsd", "transpose_a": 1},
    "out_dtype must be one of ('bfloat16', 'float16'), got 'float32'": {
        "mode": "dds",
        "out_dtype": "float32",
    },
}


@pytest.mark.parametrize("message", DESCRIPTORS)
def test_descriptors(message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        BlockSparseScaledMatmul(**DESCRIPTORS[message])


def test_a_descriptor_is_its_text():
    assert from_text(to_text(LAYER)) == LAYER == pickle.loads(pickle.dumps(LAYER))
    assert hash(LAYER) == hash(LAYER.replace()) and LAYER.replace(out_dtype="float16") != LAYER
    assert LAYER.describe() == "BlockSparseScaledMatmul(dds, transpose_b, bfloat16)"
    assert LAYER.operands == ("layout", "a", "b", "scale_a", "scale_b")


CALLS = {
    "a must be torch.float8_e4m3fn, got torch.float32; kernlib.blocksparse.quantize makes it": {
        "a": A.float()
    },
    "values must be torch.float8_e4m3fn, got torch.float8_e5m2": {
        "values": VALUES.to(torch.float8_e5m2)
    },
    "values must hold the layout's blocks, (..., 4, 16, 32), got (3, 16, 32)": {
        "values": VALUES[1:]
    },
    "a must be (..., n, 96) for a layout of": {"a": A[:, :95]},
    "scale_a must broadcast to (5,), got (4,)": {"scale_a": torch.ones(4)},
    "scale_b must have a scale for each slot of the values, (4,), got (3,)": {
        "scale_b": torch.ones(3)
    },
    "out must be torch.bfloat16, the descriptor's out_dtype, got torch.float32": {
        "out": torch.zeros(5, 32)
    },
    "out_dtype must be torch.bfloat16 or torch.float16, got torch.float32": {
        "out_dtype": torch.float32
    },
}


@pytest.mark.parametrize("message", CALLS)
def test_calls(message):
    given = GIVEN | CALLS[message]
    a, values, scale_a, scale_b = (given.pop(name) for name in GIVEN)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        scaled_dds(a, values, MADE, scale_a, scale_b, transpose_b=True, **given)


def test_counts_and_names_of_arguments():
    message = "BlockSparseScaledMatmul(dds, transpose_b, bfloat16) takes layout, a, b, scale_a and"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        run_kernel(LAYER, MADE, A, VALUES)
    with pytest.raises(TypeError, match=r"^bias is no argument of BlockSparseScaledMatmul\(dds"):
        run_kernel(LAYER, MADE, *GIVEN.values(), bias=torch.zeros(32))
    with pytest.raises(TypeError, match=r"^layout must be a kernlib\.blocksparse\.Layout"):
        run_kernel(LAYER, [[1]], *GIVEN.values())


def test_what_cannot_be_quantized():
    with pytest.raises(TypeError, match=r"^x must be a tensor, got list"):
        quantize([1.0])
    for x in (A, torch.arange(3)):
        with pytest.raises(TypeError, match=r"^x must be float32, float64, float16 or "):
            quantize(x, -1)
    with pytest.raises(IndexError, match="of x's 1 dimensions, got 1"):
        quantize(torch.zeros(3), 1)
    with pytest.raises(ValueError, match="each dimension once"):
        quantize(torch.zeros(3, 3), (0, -2))
