"""Inputs of layers that are no plain tensors: Proxies of torch.fx, jagged tensors."""

import pytest
import torch
from torch import fx, nn

import kernlib as kl
from kernlib import blocksparse, linalg, sparse
from kernlib.nn import (
    BlockSparseConv2d,
    BlockSparseLinear,
    BlockSparseMultiheadAttention,
    KroneckerLinear,
    KSLinear,
    SparseLinear,
)

LAYOUT = blocksparse.dense(32, 32, 16)
LINEAR = {
    "KSLinear": lambda: KSLinear([(2, 4, 4, 4), (2, 4, 4, 4)]),
    "KroneckerLinear": lambda: KroneckerLinear((4, 8), (4, 8)),
    "SparseLinear": lambda: SparseLinear.from_linear(nn.Linear(32, 32), "u4"),
    "BlockSparseLinear": lambda: BlockSparseLinear(32, 32, LAYOUT),
}
OTHERS = {
    "BlockSparseConv2d": lambda: BlockSparseConv2d(32, 32, 1, layout=LAYOUT),
    "BlockSparseMultiheadAttention": lambda: BlockSparseMultiheadAttention(32, 2, LAYOUT),
}


class Twice(nn.Module):
    """A layer that a model calls twice, with everything that attention takes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.others = (1, 1) if isinstance(layer, nn.MultiheadAttention) else ()

    def forward(self, x):
        if self.others:
            y, _ = self.layer(x, x, x, need_weights=False)
            return self.layer(y, x, value=x, need_weights=False)[0]
        return self.layer(self.layer(x)) + 1


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", LINEAR | OTHERS)
def test_a_symbolic_trace_calls_layers_as_modules(kind):
    model = Twice((LINEAR | OTHERS)[kind]())
    traced = fx.symbolic_trace(model)
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert [node.target for node in nodes] == ["layer", "layer"]
    x = torch.randn(32, 1, 32) if "Conv" not in kind else torch.randn(2, 32, 3, 3)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(TypeError, match=f"trace a module that holds it, such as .*{kind}"):
        fx.symbolic_trace(model.layer)


W, SQUARE, KERNEL = sparse.compress(torch.eye(4), "u4"), torch.eye(4), kl.gaussian()
CALLS = {
    "run_kernel": lambda x: kl.run_kernel(KERNEL, x, x, bandwidth=1.0),
    "cdist": lambda x: kl.cdist(x, x),
    "cdist_grad": lambda x: kl.cdist_grad(x, x, x, x),
    "kernel_sum": lambda x: kl.kernel_sum(KERNEL, x, x, bandwidth=1.0),
    "kernel_min": lambda x: kl.kernel_min(KERNEL, x, x, bandwidth=1.0),
    "kernel_topk": lambda x: kl.kernel_topk(KERNEL, x, x, bandwidth=1.0),
    "agop": lambda x: kl.agop(KERNEL, x, x, x, bandwidth=1.0),
    "kron_matmul": lambda x: kl.kron_matmul(x, [SQUARE]),
    "Kronecker-sparse": lambda x: kl.run_kernel(kl.KroneckerSparse(1, 4, 4, 1), x, x),
    "sparse": lambda x: sparse.matmul(W, x),
    "dsd": lambda x: blocksparse.dsd(x, x, LAYOUT),
    "attention": lambda x: blocksparse.attention(x, x, x, LAYOUT),
    "softmax": lambda x: blocksparse.softmax(x, LAYOUT),
    "eigh": lambda x: linalg.eigh(x),
    "conjugate_gradient": lambda x: linalg.conjugate_gradient(torch.diag, x),
}


@pytest.mark.few(99)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_a_symbolic_trace_says_how_it_is_traced(call):
    class Model(nn.Module):
        def forward(self, x):
            return CALLS[call](x)

    with pytest.raises(TypeError, match=r"Proxy; torch\.fx\.symbolic_trace takes layers of .*wrap"):
        fx.symbolic_trace(Model())


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", LINEAR)
def test_jagged_tensors_are_mapped_by_their_values(kind):
    layer = LINEAR[kind]()
    parts = [torch.randn(n, 32, requires_grad=True) for n in (3, 0, 5)]
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    y = layer(jagged)
    for found, part in zip(y.unbind(), parts, strict=True):
        torch.testing.assert_close(found, layer(part))
    (y + jagged).values().sum().backward()  # of one structure
    torch.testing.assert_close(
        parts[2].grad, torch.autograd.grad((layer(parts[2]) + parts[2]).sum(), parts[2])[0]
    )
