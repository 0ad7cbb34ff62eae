"""Shapes of several tensors together are torch's, and first calls import nothing for them."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernlib.runtime.tensors import broadcast_shapes

shapes = st.lists(st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4).map(tuple), max_size=4)


@settings(max_examples=300)
@given(shapes)
def test_they_are_torchs(shapes):
    try:
        wanted = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="shapes do not broadcast"):
            broadcast_shapes(*shapes)
        return
    found = broadcast_shapes(*shapes)
    assert found == wanted and type(found) is torch.Size


# What is called, once, in a process of its own.
FIRST_USES = {
    "a batch of cdist": "kl.cdist(torch.randn(2, 3, 4), torch.randn(2, 5, 4))",
    "a Kronecker product": "kl.kron_matmul(torch.randn(3, 16), [torch.randn(4, 4)] * 2)",
    "a solver of these": "kl.linalg.kron_solve([torch.eye(4)] * 2, torch.randn(16), noise=0.1)",
    "a block-sparse layer": "kl.nn.BlockSparseLinear(32, 32, 16, density=0.5)(torch.randn(3, 32))",
    "a Kronecker-sparse layer": "kl.nn.KSLinear([(2, 4, 4, 1)])(torch.randn(3, 8))",
    "a sparse product": "kl.sparse.matmul(kl.sparse.compress(torch.eye(8)), torch.randn(8))",
    "a product with a kernel matrix": (
        "kl.kernel_matmul(kl.gaussian(), *torch.randn(3, 4, 4), bandwidth=1.0)"
    ),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("name", FIRST_USES)
def test_a_first_call_imports_no_sympy(name):
    """0.3 s, of torch's symbolic shapes."""
    program = f"import sys, torch, kernlib as kl\n{FIRST_USES[name]}\nprint('sympy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr
