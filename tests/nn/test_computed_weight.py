"""Layers whose weight is computed when it is asked for: it reads as any tensor, and refuses writes,
which the layer would not see."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import kernlib as kl
from kernlib.nn import KroneckerLinear, KSLinear, SparseLinear

LAYERS = {
    "KSLinear": lambda: KSLinear([(2, 4, 3, 2), (1, 5, 8, 2)]),
    "KroneckerLinear": lambda: KroneckerLinear((4, 3), (2, 5)),
    "SparseLinear": lambda: SparseLinear.from_linear(nn.Linear(12, 10), density=0.5),
}
each_layer = pytest.mark.parametrize("name", LAYERS)
each_trained = pytest.mark.parametrize("name", ["KSLinear", "KroneckerLinear"])


def merge(layer, delta):
    """As adapters of low rank are merged into the layer that they stand beside."""
    layer.weight.data += delta


def merge_safely(layer, delta):
    merged = layer.weight.data.clone()
    merged += delta
    if torch.isfinite(merged).all():
        layer.weight.data = merged


def set_item(weight):
    weight[0] = 1.0


WRITES = {
    "copy_": lambda layer: layer.weight.copy_(torch.zeros(10, 12)),
    "init zeros_": lambda layer: nn.init.zeros_(layer.weight),
    "init kaiming_uniform_": lambda layer: nn.init.kaiming_uniform_(layer.weight),
    "init xavier_normal_": lambda layer: nn.init.xavier_normal_(layer.weight),
    "init orthogonal_": lambda layer: nn.init.orthogonal_(layer.weight),
    "init trunc_normal_": lambda layer: nn.init.trunc_normal_(layer.weight),
    "init eye_": lambda layer: nn.init.eye_(layer.weight),
    "data": lambda layer: layer.weight.data.mul_(2),
    "data of data": lambda layer: layer.weight.data.data.mul_(2),
    "data =": lambda layer: setattr(layer.weight, "data", torch.zeros(10, 12)),
    "detach": lambda layer: layer.weight.detach().zero_(),
    "a row": lambda layer: layer.weight[0].fill_(1),
    "an item": lambda layer: set_item(layer.weight),
    "transposed": lambda layer: layer.weight.T.mul_(2),
    "a part": lambda layer: layer.weight.chunk(2, 1)[1].mul_(2),
    "flat": lambda layer: layer.weight.T.T.unsqueeze(0).mul_(2),
    "out": lambda layer: torch.add(torch.ones(10, 12), 1, out=layer.weight),
    "two outs": lambda layer: torch.max(
        torch.ones(10, 12, 3), 2, out=(layer.weight, torch.zeros(10, 12, dtype=torch.int64))
    ),
    "inplace": lambda layer: F.relu(layer.weight, inplace=True),
    "foreach": lambda layer: torch._foreach_mul_([torch.ones(2), layer.weight], 2.0),
    "operator": lambda layer: torch.ops.aten.mul_.Tensor(layer.weight, torch.ones(())),
    "merge": lambda layer: merge(layer, torch.ones(10, 12)),
    "merge safely": lambda layer: merge_safely(layer, torch.ones(10, 12)),
}


@each_layer
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_and_says_what_to_do(write, name):
    layer = LAYERS[name]()
    before, advice = layer.weight.clone(), "from_linear" if name == "SparseLinear" else "factors"
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"write the weight of a {name}") as e:
        WRITES[write](layer)
    assert advice in str(e.value) and torch.equal(layer.weight, before)


@each_layer
def test_a_write_that_records_a_gradient_is_refused_too(name):
    layer = LAYERS[name]()
    for write in ("copy_", "data", "an item", "merge"):
        with pytest.raises(RuntimeError, match="would write the weight"):
            WRITES[write](layer)


@each_layer
def test_another_weight_in_its_place_is_refused(name):
    layer = LAYERS[name]()
    for value in (torch.zeros(10, 12), nn.Parameter(torch.zeros(10, 12)), None):
        with pytest.raises(AttributeError, match=f"weight of a {name} is computed.*cannot be set"):
            layer.weight = value
    assert list(layer.state_dict()) == list(LAYERS[name]().state_dict())


@each_layer
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_what_rewrites_parameters_raises_and_leaves_the_layer_as_it_was(name):
    layer, x = LAYERS[name](), torch.randn(3, 12)
    before = layer(x)
    for rewrite in (
        lambda: prune.l1_unstructured(layer, "weight", 0.5),
        lambda: nn.utils.spectral_norm(layer),
        lambda: nn.utils.weight_norm(layer),
        lambda: parametrizations.spectral_norm(layer),
        lambda: parametrizations.weight_norm(layer),
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            rewrite()
    assert torch.equal(layer(x), before)


@each_trained
def test_gradients_pass_through_it(name):
    layer, x = LAYERS[name](), torch.randn(3, 12)
    weight = layer.weight
    weight.retain_grad()
    F.linear(x, weight, layer.bias).square().sum().backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).square().sum().backward()
    torch.testing.assert_close(grads, [p.grad for p in layer.parameters()])
    assert weight.grad.shape == (10, 12)
    assert torch.equal(torch.autograd.grad((weight * 2).sum(), weight)[0], torch.full((10, 12), 2))

    def loss(parameters):
        held = torch.func.functional_call(Reader(layer), parameters, (x,))
        return held.square().sum()

    named = {f"layer.{key}": p.detach() for key, p in layer.named_parameters()}
    for gradient, wanted in zip(torch.func.grad(loss)(named).values(), grads, strict=True):
        torch.testing.assert_close(gradient, wanted)
    both = {key: torch.stack([p, 2 * p]) for key, p in named.items()}
    assert torch.vmap(loss)(both).shape == (2,)


class Reader(nn.Module):
    """Computes with the weight of a layer itself, as models with tied weights do."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return F.linear(x, self.layer.weight, self.layer.bias)


@each_layer
def test_what_is_computed_of_it_may_be_written(name):
    weight, matrix = LAYERS[name]().weight.detach(), torch.zeros(10, 12)
    assert torch.equal(matrix.copy_(weight), weight)
    for other in (weight.clone(), weight + 0, weight.double(), weight @ weight.T, weight.sum(0)):
        assert type(other) is torch.Tensor
        other.add_(1)
    assert kl.cdist(weight, matrix).shape == (10, 10)
    leaf = LAYERS[name]().weight.detach().requires_grad_()
    leaf.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())


@each_layer
def test_copies_of_it_are_tensors_of_torchs_own(name):
    weight, file = LAYERS[name]().weight.detach(), io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), torch.load(file)):
        assert type(other) is torch.Tensor and torch.equal(other, weight)
        other.zero_()
    assert repr(weight).startswith("tensor(")
    for array in (weight.numpy(), np.asarray(weight)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    twice = copy.deepcopy([weight, weight])
    assert twice[0] is twice[1]


@each_layer
def test_a_parameter_made_of_it_trains_and_is_copied(name):
    layer, linear, x = LAYERS[name](), nn.Linear(12, 10), torch.randn(3, 12)
    linear.weight = nn.Parameter(layer.weight.detach())
    linear.bias = layer.bias
    torch.testing.assert_close(linear(x), layer(x))
    for made in (linear, copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert isinstance(made.weight, nn.Parameter) and made.weight.requires_grad
        before = made.weight.detach().clone()
        made(x).square().sum().backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        nn.init.zeros_(made.bias)
        assert not torch.equal(made.weight, before)
        made.weight.data.zero_()
        assert not made.weight.any()


@pytest.mark.few(1)
@each_trained
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_compiled_code_reads_it(name):
    torch._dynamo.reset()
    layer, x = LAYERS[name](), torch.randn(3, 12)
    inside = torch.compile(Reader(layer), backend="aot_eager", fullgraph=True)
    graph = torch.compile(lambda x, weight: F.linear(x, weight) * 2, backend="aot_eager")
    turned = torch.compile(lambda x, weight: x @ weight.T, backend="aot_eager")
    torch.testing.assert_close(inside(x), layer(x))
    for _ in range(2):
        torch.testing.assert_close(graph(x, layer.weight), F.linear(x, layer.weight) * 2)
        torch.testing.assert_close(turned(x, layer.weight), x @ layer.weight.T)
    full = torch.compile(lambda x, w: F.linear(x, w) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(full(x, layer.weight.clone()), F.linear(x, layer.weight) * 2)
    program = torch.export.export(Reader(layer), (x,), strict=False).module()
    torch.testing.assert_close(program(x), layer(x))
    torch._dynamo.reset()
