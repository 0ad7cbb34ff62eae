"""Gated linear units as an epilogue: their text, their values, who refuses them."""

import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import kernlib as kl
from kernlib.descriptors.gates import ACTIVATIONS
from kernlib.descriptors.text import from_text
from kernlib.lowering.product_source import finish
from kernlib.runtime import expressions

FORMULAS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@pytest.mark.few(by="activation")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_product_with_the_activation(activation, seed):
    made = kl.Gate(activation)
    v, gate = (torch.randn(40, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = expressions.apply((made,), v, {"gate": gate})
    torch.testing.assert_close(found, v * FORMULAS[activation](gate))
    assert torch.autograd.gradcheck(
        lambda v, gate: expressions.apply((made,), v, {"gate": gate}), (v, gate), fast_mode=True
    )


def test_it_is_plain_data():
    made = kl.BlockSparseMatmul("dds", epilogue=(kl.Gate("gelu"), kl.Scale()))
    assert from_text(made.text) == made == pickle.loads(pickle.dumps(made))
    assert made.summands == ("gate",) and kl.Gate() == kl.Gate("silu")
    assert hash(kl.Gate("relu")) != hash(kl.Gate())
    with pytest.raises(ValueError, match="activation must be one of silu, gelu"):
        kl.Gate("swish")
    with pytest.raises(ValueError, match="activation must be one of"):
        kl.Gate(None)


def test_its_text_is_known_where_none_was_made():
    text = kl.BlockSparseMatmul("dds", epilogue=kl.Gate()).text
    program = (
        "import kernlib.families.blocksparse.descriptor\n"
        "from kernlib.descriptors.text import from_text\n"
        f"print(from_text({text!r}).summands)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "('gate',)\n", found.stderr


def test_a_kernel_reads_it_whatever_the_numbers_are():
    text = finish((kl.Add(), kl.Gate("relu")))
    assert "(k == 0 && parameter_beta != AccT(0)) || (k == 1 && true)" in text
    assert "v = (v * maximum(given[1], " in text


OTHERS = {
    "pairwise": lambda: kl.Pairwise(epilogue=kl.Gate()),
    "Kronecker-sparse": lambda: kl.KroneckerSparse(2, 4, 4, 1, epilogue=kl.Gate()),
    "sparse": lambda: kl.SparseMatmul(kl.Gate()),
}


@pytest.mark.parametrize("family", OTHERS)
def test_families_whose_kernels_read_no_such_tensor_refuse_it(family):
    with pytest.raises(ValueError, match=r"Gate\(activation='silu'\) takes a tensor of the result"):
        OTHERS[family]()


def test_products_take_it(seed):
    layout = kl.blocksparse.Layout([[1, 0, 1], [0, 1, 1]], 16)
    gate_weight, up_weight = torch.randn(2, 4, 16, 16, dtype=torch.float64)
    x = torch.randn(5, 48, dtype=torch.float64)
    gate = kl.blocksparse.dds(x, gate_weight, layout, transpose_b=True)
    found = kl.blocksparse.dds(
        x, up_weight, layout, transpose_b=True, epilogue=kl.Gate(), gate=gate, out=gate.clone()
    )
    dense = [layout.to_dense(w) for w in (gate_weight, up_weight)]
    torch.testing.assert_close(found, F.silu(x @ dense[0].mT) * (x @ dense[1].mT))
    factors = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    x, gate = torch.randn(2, 3, 16, dtype=torch.float64)
    made = kl.KroneckerProduct((4, 4), epilogue=kl.Gate("gelu"))
    found = kl.run_kernel(made, x, *factors, gate=gate)
    torch.testing.assert_close(found, (x @ torch.kron(*factors)) * F.gelu(gate))
    with pytest.raises(ValueError, match=r"gate must broadcast to \(3, 16\), got \(4, 16\)"):
        kl.run_kernel(made, x, *factors, gate=torch.zeros(4, 16, dtype=torch.float64))
