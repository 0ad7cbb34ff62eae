"""Programs that are compiled or exported: one product a group, and two where x was written."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from kernlib.nn import sparsify
from tests.nn.fused.models import DENSITY, LlamaMLP, close, inputs, pair, write, write_a_view
from tests.support.dynamo_messages import said


def compiled(module, **options):
    """A module compiled as one graph, and the list of how many products each graph has."""
    torch._dynamo.reset()
    counts: list[int] = []

    def count(graph, _):
        counts.append(sum("sparse_matmul" in str(node.target) for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=count)
    return torch.compile(module, fullgraph=True, backend=backend, **options), counts


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("bias", (False, True))
def test_compiled_it_is_one_graph_of_four_products(mode, bias):
    fused, apart = pair(bias=bias)
    run, counts = compiled(fused)
    with mode():
        for seed in (1, 2):
            x = inputs(1, 3, seed=seed)
            close(run(x), apart(x))
    assert counts == [4]


def test_compiled_gradients():
    results = []
    fused, apart = pair(bias=True)
    for model in (torch.compile(fused, fullgraph=True, backend="aot_eager"), apart):
        x = inputs(2, 3).requires_grad_()
        model(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in (fused, apart)[model is apart].parameters())])
    for ours, plain in zip(*results, strict=True):
        close(ours, plain)


class Between(nn.Module):
    """Something happens between the calls of two layers."""

    def __init__(self, layers: nn.Module, change, first=nullcontext, second=nullcontext):
        super().__init__()
        self.layers, self.change, self.first, self.second = layers, change, first, second

    def forward(self, x):
        x = x * 2
        with self.first():
            gate = self.layers.gate_proj(x)
        self.change(x)
        with self.second():
            up = self.layers.up_proj(x)
        return gate.float(), up.float()


def no_change(x):
    pass


def write_by_out(x):
    torch.sin(x, out=x)


def write_an_element(x):
    x[..., 0] = 3


def write_data(x):
    x.data.mul_(2)


def write_detached(x):
    x.detach().mul_(2)


def write_a_transposed_view(x):
    x.T.copy_(x.T + 1)


def read(x):
    return (x.float().mean(-1, keepdim=True) * x).transpose(0, 1)


@pytest.mark.parametrize(
    "change, count",
    [
        (read, 1), (no_change, 1), (write, 2), (write_a_view, 2), (write_by_out, 2),
        (write_an_element, 2), (write_a_transposed_view, 2), (write_data, 2), (write_detached, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_compiled_products_of_a_written_x_are_two(change, count, mode):
    fused, apart = pair(lambda bias: LlamaMLP(bias), bias=True)
    run, counts = compiled(Between(fused, change))
    with mode():
        x = inputs(3)
        for ours, plain in zip(run(x), Between(apart, change)(x), strict=True):
            close(ours, plain)
    assert counts == [count]


def test_compiled_products_in_different_modes_are_two():
    fused, apart = pair(lambda bias: LlamaMLP(bias), bias=True)
    for first, second in (
        (torch.no_grad, torch.enable_grad),
        (torch.enable_grad, torch.no_grad),
    ):
        run, _ = compiled(Between(fused, no_change, first, second))
        plain = Between(apart, no_change, first, second)
        for ours, theirs in zip(run(inputs(3)), plain(inputs(3)), strict=True):
            assert ours.requires_grad == theirs.requires_grad
            close(ours, theirs)


def test_programs_of_other_batches_have_four_products_too():
    fused, apart = pair()
    run, counts = compiled(fused, dynamic=True)
    with torch.no_grad():
        for batch in (7, 11, 19):
            close(run(inputs(2, batch)), apart(inputs(2, batch)))
    assert set(counts) == {4}


def test_a_compiled_checkpoint():
    fused, apart = pair(bias=True)

    def run(model, x):
        return checkpoint(model, x, use_reentrant=False)

    run, results = torch.compile(run, fullgraph=True, backend="aot_eager"), []
    for model, call in ((fused, run), (apart, lambda model, x: model(x))):
        x = inputs(4).requires_grad_()
        call(model, x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for ours, plain in zip(*results, strict=True):
        close(ours, plain)


def test_an_exported_program():
    fused, apart = pair(bias=True)
    x = inputs(3)
    with torch.no_grad():
        program = torch.export.export(fused, (x,), strict=False)
        close(program.module()(x), apart(x))


@pytest.mark.parametrize("shape", [(96,), (1,)])
def test_a_bias_that_is_set_later_is_that_of_eager_calls(shape):
    """Of a layer whose group had none, as compiled calls ask for those of others only then."""
    torch.manual_seed(0)
    model = LlamaMLP(False)
    sparsify(model, density=DENSITY, fuse=True)
    model.gate_proj.bias = nn.Parameter(100 * torch.randn(shape))
    x = inputs(2)
    run, _ = compiled(model)
    if shape == (1,):
        for call in (model, run):
            with pytest.raises(Exception, match=said(r"bias must have shape \(96,\), got \(1,\)")):
                call(x)
        return
    close(run(x), model(x))
