"""Exports to ONNX: programs of torch's own operators, or an error that says what would do."""

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib import blocksparse, sparse
from kernlib.nn import (
    BlockSparseConv2d,
    BlockSparseLinear,
    BlockSparseMultiheadAttention,
    KroneckerLinear,
    KSLinear,
    SparseLinear,
)

LAYOUT, HEADS = blocksparse.causal(32, 16), blocksparse.dense(32, 32, 16, heads=2)
W, SQUARE = sparse.compress(torch.eye(32), "u4"), torch.randn(4, 4)


class Call(nn.Module):
    """A function as a module, of which parts are its modules."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x):
        return self.function(x, *self.parts)


def attended(x, layer):
    return layer(x, x, x, need_weights=False)[0]


CASES = {
    "KSLinear": lambda: (KSLinear([(2, 4, 4, 4), (2, 4, 4, 4)], activation="gelu"), (24, 32)),
    "KroneckerLinear": lambda: (KroneckerLinear((4, 8), (4, 8), activation="silu"), (24, 32)),
    "BlockSparseLinear": lambda: (BlockSparseLinear(32, 32, LAYOUT), (24, 32)),
    "BlockSparseConv2d": lambda: (
        BlockSparseConv2d(32, 32, 1, layout=blocksparse.dense(32, 32, 16)), (2, 32, 4, 4)
    ),
    "attention layer": lambda: (
        Call(attended, BlockSparseMultiheadAttention(32, 2, HEADS)), (32, 2, 32)
    ),
    "Kronecker-sparse": lambda: (
        Call(lambda x: kl.run_kernel(kl.KroneckerSparse(2, 4, 4, 4), x, torch.ones(2, 4, 4, 4))),
        (24, 32),
    ),
    "kron_matmul": lambda: (Call(lambda x: kl.kron_matmul(x, [SQUARE, SQUARE])), (24, 16)),
    "sdd": lambda: (Call(lambda x: blocksparse.sdd(x, x, LAYOUT, transpose_b=True)), (32, 8)),
}  # fmt: skip
REFUSED = {
    "cdist": lambda x: kl.cdist(x, x),
    "kernel_matmul": lambda x: kl.kernel_matmul(kl.gaussian(), x, x, x, bandwidth=1.0),
    "sparse": lambda x: sparse.matmul(W, x),
    "attention": lambda x: blocksparse.attention(
        x[None, None], x[None, None], x[None, None], LAYOUT
    ),
    "SparseLinear": SparseLinear.from_linear(nn.Linear(32, 32), format="u4"),
}


def exported(module, x):
    return torch.export.export(module.eval(), (x,), strict=False)


@pytest.fixture
def exporting(monkeypatch):
    """What torch.onnx.export says while it has a module exported."""
    monkeypatch.setattr("torch.onnx.is_in_onnx_export", lambda: True)


@pytest.mark.few(99)
@pytest.mark.parametrize("case", CASES)
def test_what_is_exported_holds_operators_of_torch_alone(case, exporting):
    module, shape = CASES[case]()
    x = torch.randn(shape)
    program = exported(module, x).run_decompositions()  # as torch.onnx.export does
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names and not [name for name in names if "kernlib" in name]
    torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.few(99)
@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_has_no_operators_for_says_what_would_do(case, exporting):
    module = REFUSED[case]
    module = module if isinstance(module, nn.Module) else Call(module)
    with pytest.raises(TypeError, match=r"kernlib::\w+ cannot be exported to ONNX: .*to_dense\(\)"):
        exported(module, torch.randn(32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_exported_model_computes_what_the_module_does(case):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    from onnx.reference import ReferenceEvaluator

    module, shape = CASES[case]()
    x = torch.randn(shape)
    program = torch.onnx.export(module.eval(), (x,), dynamo=True, verbose=False)
    model = ReferenceEvaluator(program.model_proto)
    (found,) = model.run(None, {model.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(x).detach())
