"""Gradients of compiled calls whose backward pass is one operator: batches of them, and what such a
call keeps between its passes."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import kernlib as kl
from kernlib.families.kronecker_product import operation
from tests.contract.library.calls import compiled, targets

FACTORS = kl.KroneckerSparse(2, 3, 4, 5), kl.KroneckerSparse(1, 4, 6, 5)
CHAIN = kl.KroneckerSparseChain(FACTORS)
LAYOUT = kl.blocksparse.Layout([[1, 0, 1], [0, 1, 1]], 16)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


# A call, what it takes of x and weights, and the operator of all their gradients.
CALLS = {
    "factor": (
        lambda x, weight: kl.run_kernel(FACTORS[0], x, weight), ((7, 40), (2, 3, 4, 5)),
        "kronecker_sparse_chain_gradients",
    ),
    "chain": (
        lambda x, *weights: kl.run_kernel(CHAIN, x, *weights),
        ((7, 40), (2, 3, 4, 5), (1, 4, 6, 5)),
        "kronecker_sparse_chain_gradients",
    ),
    "Kronecker product": (
        lambda x, *factors: kl.kron_matmul(x, factors), ((7, 40), (8, 4), (5, 5)),
        "kronecker_product_gradients",
    ),
    "blocks": (
        lambda x, values: kl.blocksparse.dsd(values, x, LAYOUT), ((48, 20), (4, 16, 16)),
        "blocksparse_matmul_gradients",
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def compiled_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(operation, "has_kernels", lambda *call: True)
    yield
    torch._dynamo.reset()


@EACH
def test_batches_of_gradients(name, seed):
    call, shapes, _ = CALLS[name]
    leaves = [randn(*shape).requires_grad_() for shape in shapes]
    y = compiled(call)(*leaves)
    grads = randn(3, *y.shape)
    found = torch.autograd.grad(y, leaves, grads, is_grads_batched=True)
    wanted = [torch.autograd.grad(call(*leaves), leaves, grad) for grad in grads]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*wanted, strict=True))))


@EACH
def test_x_is_kept_for_gradients_of_weights_alone(name, seed):
    call, shapes, operator = CALLS[name]
    for trained in (True, False):
        x, *weights = [randn(*shape).requires_grad_(trained) for shape in shapes]
        backward, leaves = [], [x.requires_grad_(), *(weights if trained else ())]

        def keep(graph_module, inputs, graphs=backward):
            graphs.append(graph_module)
            return make_boxed_func(graph_module)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=boxed, bw_compiler=keep)
        y, theirs = compiled(call, backend)(x, *weights), call(x, *weights)
        grad = randn(*y.shape)
        found = torch.autograd.grad(y, leaves, grad)
        torch.testing.assert_close(found, torch.autograd.grad(theirs, leaves, grad))
        (graph,) = backward
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        kept = [tuple(node.meta["val"].shape) for node in inputs if "val" in node.meta]
        assert (shapes[0] in kept) is trained
        assert (f"kernlib.{operator}.default" in targets(graph)) is trained


def boxed(graph_module, inputs):
    return make_boxed_func(graph_module)


@pytest.mark.filterwarnings("ignore")  # that it is deprecated
def test_a_chain_with_a_gradient_is_traced(seed):
    call, shapes, _ = CALLS["chain"]
    leaves = [randn(*shape).requires_grad_() for shape in shapes]
    traced = torch.jit.trace(call, tuple(leaves))
    found, wanted = (torch.autograd.grad(run(*leaves).sum(), leaves) for run in (traced, call))
    torch.testing.assert_close(found, wanted)


@EACH
def test_a_recorded_backward_pass_has_derivatives(name, seed):
    call, shapes, _ = CALLS[name]
    leaves = [randn(*shape).requires_grad_() for shape in shapes]

    def gradients(*leaves):
        y = call(*leaves)
        return torch.autograd.grad(y.square().sum(), leaves, create_graph=True)

    found, wanted = (
        torch.autograd.grad(sum(t.square().sum() for t in run(*leaves)), leaves)
        for run in (make_fx(gradients)(*leaves), gradients)
    )
    torch.testing.assert_close(found, wanted)


def programs(call, *tensors) -> list[set[str]]:
    """Operators of kernlib in each graph of a compiled call, with its backward pass if a gradient
    is recorded."""
    graphs = []

    def note(graph, _):
        graphs.append({str(one).split(".")[1] for one in targets(graph) if "kernlib." in str(one)})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, inference_compiler=note)
    y = torch.compile(call, backend=backend, fullgraph=True)(*tensors)
    if y.requires_grad:
        y.sum().backward()
    return graphs


def test_a_compiled_chain_is_one_operator_each_way(seed):
    call, shapes, gradients = CALLS["chain"]
    tensors = [randn(*shape) for shape in shapes]
    assert programs(call, *tensors) == [{"kronecker_sparse_chain"}]
    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in tensors]
    assert programs(call, *leaves) == [{"kronecker_sparse_chain_product"}, {gradients}]
    torch._dynamo.reset()
    first, second = (
        kl.KroneckerSparse(2, 3, 4, 5, epilogue=(kl.Bias("bias"), kl.Gelu())), FACTORS[1]
    )  # fmt: skip
    between = kl.KroneckerSparseChain((first, second))
    bias = randn(30)

    def biased(x, *weights):
        return kl.run_kernel(between, x, *weights, bias=bias)

    with torch.no_grad():
        assert programs(biased, *tensors) == [{"kronecker_sparse_chain"}]
        torch.testing.assert_close(compiled(biased)(*tensors), biased(*tensors))
