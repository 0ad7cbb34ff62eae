"""SparseLinear as a module: compression, gradients, saving, and life in place of nn.Linear."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernlib as kl
from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import compress, magnitude
from tests.families.sparse.cases import FORMATS
from tests.nn.models import model, names

each_format = pytest.mark.parametrize("format", FORMATS)


def linear(bias: bool = True, dtype=torch.float16, density: float | None = 0.3) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(300, 70, bias).to(dtype)
    if density is not None:
        magnitude(made.weight, density, inplace=True)
    return made


def inputs(*batch: int, dtype=torch.float16) -> torch.Tensor:
    return torch.randn(*batch, 300, generator=torch.Generator().manual_seed(1)).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-3) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    wanted = wanted.double()
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()


# Construction.


def test_what_cannot_be_swapped_or_made_is_refused():
    model = nn.Sequential(nn.Linear(16, 8))
    for given, error, words in (
        (0.5, TypeError, "match must be None, a regular expression, .* got 0.5"),
        (["0"], TypeError, r"match must be .* got \['0'\]"),
        ("[", ValueError, r"match '\[' is no regular expression"),
    ):
        with pytest.raises(error, match=words):
            sparsify(model, match=given)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got dict"):
        sparsify({})
    for sizes in ((-1, 8), ("16", 8), (16, 8.0)):
        with pytest.raises(ValueError, match="features must be an int of at least 0"):
            SparseLinear(*sizes)
    assert type(model[0]) is nn.Linear


def test_names_and_order_of_arguments():
    assert list(inspect.signature(SparseLinear).parameters) == [
        "in_features", "out_features", "bias", "activation", "dtype", "device",
    ]  # fmt: skip
    assert list(inspect.signature(SparseLinear.from_linear).parameters) == [
        "linear", "format", "density", "per", "activation", "columns", "values",
    ]  # fmt: skip
    assert list(inspect.signature(sparsify).parameters) == [
        "model", "match", "density", "format", "per", "columns", "fuse", "values",
    ]  # fmt: skip


@each_format
@pytest.mark.parametrize("bias", (False, True))
def test_a_layer_is_the_linear_that_it_was_made_of(format, bias):
    plain = linear(bias)
    layer = SparseLinear.from_linear(plain, format=format)
    assert (layer.in_features, layer.out_features) == (300, 70)
    assert layer.matrix.format == format and layer.nbytes == layer.matrix.nbytes
    assert layer.bias is plain.bias
    assert torch.equal(layer.to_dense(), plain.weight) and torch.equal(layer.weight, plain.weight)
    for batch in ((), (1,), (7,), (2, 3), (0,), (33,)):
        x = inputs(*batch)
        close(layer(x), plain.float()(x.float()).half())
        plain.half()
    assert not [name for name, _ in layer.named_parameters() if name != "bias"]
    text = repr(layer)
    assert f"format={format!r}, dtype=torch.float16, density=0.3" in text
    assert f"bytes={layer.nbytes}" in text and f"bias={bias}" in text


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_layer_whose_weight_is_one_of_torchs_sparse_tensors():
    for layout in ("csr", "csc", "coo", "bsr", "bsc"):
        plain, size = linear(), ((10, 20),) if layout.startswith("bs") else ()
        dense = plain.weight.detach()
        plain.weight = nn.Parameter(getattr(dense, f"to_sparse_{layout}")(*size), False)
        layer = SparseLinear.from_linear(plain)
        assert torch.equal(layer.to_dense(), dense), layout
        assert layer.matrix.nnz == dense.count_nonzero()


def test_a_density_prunes_a_copy():
    plain = linear(density=None)
    before = plain.weight.detach().clone()
    layer = SparseLinear.from_linear(plain, density=0.25)
    assert torch.equal(plain.weight, before)
    assert torch.equal(layer.to_dense(), magnitude(before, 0.25))
    assert layer.matrix.nnz == round(0.25 * before.numel())
    rows = SparseLinear.from_linear(plain, density=0.25, per="row").to_dense()
    assert torch.count_nonzero(rows, 1).tolist() == [75] * 70


ACTIVATIONS = {
    "gelu": F.gelu,
    kl.Gelu("tanh"): lambda v: F.gelu(v, approximate="tanh"),
    (kl.Relu(), kl.Tanh()): lambda v: torch.tanh(F.relu(v)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    layer = SparseLinear.from_linear(linear(), format="bitmap", activation=activation)
    plain = SparseLinear.from_linear(linear(), format="bitmap")
    wanted = ACTIVATIONS[activation](plain.float()(inputs(5).float()))
    close(layer(inputs(5)), wanted.half())
    assert f"activation={layer.activation[0]}" in repr(layer)


def test_a_matrix_and_a_plain_tensor_as_bias():
    matrix, bias = compress(linear().weight), torch.ones(70).half()
    layer = SparseLinear.from_matrix(matrix, bias)
    assert layer.matrix is matrix and isinstance(layer.bias, nn.Parameter)
    assert torch.equal(layer.bias, bias)
    assert SparseLinear.from_matrix(matrix).bias is None


WRONG = {
    "module": (lambda: SparseLinear.from_linear(nn.ReLU()), TypeError, "an nn.Linear, got .*ReLU"),
    "double": (lambda: SparseLinear.from_linear(linear().double()), TypeError, "got torch.float64"),
    "format": (
        lambda: SparseLinear.from_linear(linear(), format="csr"),
        ValueError,
        "format.*'csr'",
    ),
    "density": (lambda: SparseLinear.from_linear(linear(), density=2), ValueError, "from 0 to 1"),
    "tensor": (lambda: SparseLinear.from_matrix(torch.ones(3, 4)), TypeError, "got torch.Tensor"),
    "bias": (
        lambda: SparseLinear.from_matrix(compress(linear().weight), torch.ones(3).half()),
        ValueError,
        r"bias must have shape \(70,\), got \(3,\)",
    ),
    "bias dtype": (
        lambda: SparseLinear.from_matrix(compress(linear().weight), torch.ones(70)),
        TypeError,
        "bias must be torch.float16 as the matrix is, got torch.float32",
    ),
    "empty": (lambda: SparseLinear(300, 70)(inputs(2).float()), RuntimeError, "is empty: load a"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        make()


# Gradients.


@each_format
@pytest.mark.parametrize("activation", (None, "gelu"))
def test_gradients_reach_x_and_the_bias(format, activation):
    plain = linear(dtype=torch.float32)
    layer = SparseLinear.from_linear(copy.deepcopy(plain), format=format, activation=activation)
    x, y = (inputs(5, dtype=torch.float32).requires_grad_() for _ in range(2))
    wanted = F.gelu(plain(y)) if activation else plain(y)
    layer(x).square().sum().backward()
    wanted.square().sum().backward()
    close(x.grad, y.grad, 1e-5)
    close(layer.bias.grad, plain.bias.grad, 1e-5)
    assert not any(t.requires_grad for t in layer.matrix.operands)


def test_a_frozen_bias_stays_frozen():
    plain = linear()
    plain.bias.requires_grad_(False)
    layer = SparseLinear.from_linear(plain)
    assert not layer.bias.requires_grad and not layer(inputs(2)).requires_grad


def test_autocast_takes_x_in_the_dtype_of_the_weight():
    layer = SparseLinear.from_linear(linear(dtype=torch.bfloat16), format="bitmap")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(inputs(3, dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    close(y, layer(inputs(3, dtype=torch.bfloat16)), 1e-6)


def test_compiled_it_is_one_graph_whose_weights_stay_where_they_are():
    """Tensors that Dynamo does not know to be static would be copied at each replay."""
    layer, kinds = SparseLinear.from_linear(linear(), format="bitmap", activation="silu"), []

    def backend(module, given):
        kinds.append([getattr(t, "_dynamo_static_input_type", None) for t in given])
        return module

    torch._dynamo.reset()
    compiled, x = torch.compile(layer, fullgraph=True, backend=backend), inputs(3)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    (found,) = kinds
    assert len(found) == 5 and [kind is None for kind in found].count(True) == 1  # x


def test_a_compiled_layer_records_gradients():
    torch._dynamo.reset()
    layer = SparseLinear.from_linear(linear(dtype=torch.float32), format="bitmap")
    compiled, gradients = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
    for call in (compiled, layer):
        x = inputs(3, dtype=torch.float32).requires_grad_()
        gradients.append(torch.autograd.grad(call(x).square().sum(), (x, layer.bias)))
    for ours, wanted in zip(*gradients, strict=True):
        close(ours, wanted, 1e-5)


# Saving and moving.


@each_format
def test_a_state_dict_loads_into_every_layer_of_the_size(format):
    layer = SparseLinear.from_linear(linear(), format=format)
    state, x = layer.state_dict(), inputs(4)
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    wanted = layer(x)
    targets = [
        SparseLinear(300, 70, dtype=torch.float16),
        SparseLinear(300, 70, dtype=torch.float16, device="meta"),
        SparseLinear.from_linear(linear(density=0.9), format="bitmap"),
        SparseLinear.from_linear(linear(density=0.01), format="dense"),
        SparseLinear.from_linear(linear(), format=format).to("meta").to_empty(device="cpu"),
    ]
    for target in targets:
        target.load_state_dict(state)
        assert target.matrix.format == format and target.matrix.nnz == layer.matrix.nnz
        assert torch.equal(target(x), wanted) and torch.equal(target.to_dense(), layer.to_dense())
        assert set(target.state_dict()) == set(state)
    assert torch.equal(targets[0].bias, layer.bias) and targets[1].bias.dtype == torch.float16
    for tensor in targets[0].matrix.operands:  # which are copies
        tensor.zero_()
    assert all(torch.equal(layer.state_dict()[k], v) for k, v in state.items())


def test_assigned_tensors_are_those_that_were_loaded():
    layer = SparseLinear.from_linear(linear(), format="bitmap")
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.device("meta"):
        target = SparseLinear(300, 70)
    target.load_state_dict(state, assign=True)
    memory = state["weight_packed"].untyped_storage().data_ptr()
    assert target.weight_data.untyped_storage().data_ptr() == memory
    assert target.state_dict()["weight_packed"].untyped_storage().data_ptr() == memory
    assert torch.equal(target(inputs(2)), layer(inputs(2)))
    other = SparseLinear.from_linear(linear(dtype=torch.float32), format="dense")
    other.load_state_dict(state)  # into the dtype of the layer
    assert other.matrix.dtype == torch.float32 and other.matrix.format == "bitmap"
    assert torch.equal(other.to_dense(), layer.to_dense().float())


@each_format
def test_copies_and_pickles(format):
    layer, x = SparseLinear.from_linear(linear(), format=format, activation="relu"), inputs(3)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x)) and other.activation == layer.activation
        pairs = zip(other.matrix.operands, layer.matrix.operands, strict=True)
        assert all(a.data_ptr() != b.data_ptr() for a, b in pairs if a.numel())
        held = [getattr(other, f"weight_{name}") for name in other.matrix.tensors]
        assert all(a is b for a, b in zip(held, other.matrix.operands, strict=True))


@each_format
def test_another_dtype_rounds_the_values(format):
    layer = SparseLinear.from_linear(linear(), format=format)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        other = copy.deepcopy(layer).to(dtype)
        assert other.matrix.dtype == other.bias.dtype == dtype
        assert torch.equal(other.to_dense(), linear().weight.to(dtype))
        assert other(inputs(2, dtype=dtype)).dtype == dtype
    with pytest.raises(TypeError, match=r"must be one of float32, .*got torch\.float64"):
        layer.double()
    with pytest.raises(TypeError, match="on meta has no values to turn from"):
        copy.deepcopy(layer).to("meta").bfloat16()


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_type_for_everything_leaves_whole_numbers_whole(format, dtype):
    """``Module.type`` casts every buffer, ``Module.to`` those of floats alone."""
    layer, x = SparseLinear.from_linear(linear(), format=format), inputs(3, dtype=dtype)
    wanted = copy.deepcopy(layer).to(dtype)
    typed = torch.nn.Sequential(layer).type(dtype)[0]
    assert torch.equal(typed(x), wanted(x)) and typed.matrix.dtype == dtype
    for one, other in zip(typed.matrix.operands, wanted.matrix.operands, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@each_format
def test_a_shallow_copy_leaves_the_layer_as_it_was(format):
    layer, x = SparseLinear.from_linear(linear(), format=format), inputs(3)
    wanted, held, bias = layer(x), layer.matrix.operands, layer.bias.detach().clone()
    other = copy.copy(layer)
    assert torch.equal(other(x), wanted)
    other.bfloat16()
    layer.bias.data = bias  # which is the copy's too
    assert torch.equal(layer(x), wanted)
    buffers = [getattr(layer, f"weight_{name}") for name in layer.matrix.tensors]
    assert all(a is b for a, b in zip(buffers, held, strict=True))


def test_a_bias_that_is_computed():
    layer, x = SparseLinear.from_linear(linear()), inputs(3)
    wanted = layer(x) + layer.bias.detach()
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", Doubled())
    close(layer(x), wanted)
    layer(x).sum().backward()
    assert layer.parametrizations.bias.original.grad is not None


class Doubled(torch.nn.Module):
    def forward(self, bias: torch.Tensor) -> torch.Tensor:
        return 2 * bias


def test_moving_keeps_the_number_of_entries():
    layer = SparseLinear.from_linear(linear(), format="bitmap")
    nnz = layer.matrix.nnz
    moved = copy.deepcopy(layer).to("meta")
    assert moved.matrix.device.type == "meta" and moved.matrix.nnz == nnz
    assert "density" not in repr(moved) and moved(inputs(3).to("meta")).shape == (3, 70)


# In place of nn.Linear.


@pytest.mark.parametrize(
    ("filter", "wanted"),
    [
        (None, {"0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj", "1.0", "1.2", "2"}),
        (r"[qkv]_proj", {"0.q_proj", "0.k_proj", "0.v_proj"}),
        (lambda name, layer: layer.out_features == 12 and layer.bias is not None,
         {"0.o_proj", "1.2"}),
        ("nothing", set()),
    ],
    ids=["all", "regex", "function", "none"],
)  # fmt: skip
def test_a_filter_says_which_layers_are_swapped(filter, wanted):
    net = model()
    swapped = sparsify(net, match=filter)
    assert set(swapped) == names(net, SparseLinear) == wanted
    assert all(net.get_submodule(name) is layer for name, layer in swapped.items())


def test_a_swapped_model_computes_the_same():
    net, x = model(), torch.randn(2, 7, 12)
    wanted = net(x)
    sparsify(net)
    torch.testing.assert_close(net(x), wanted, rtol=1e-4, atol=1e-5)
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_density_format_bias_and_mode_are_passed_on():
    net = model(dtype=torch.bfloat16).eval()
    biases = {name: p for name, p in net.named_parameters() if name.endswith("bias")}
    for name, layer in sparsify(net, density=0.5, format="bitmap", per="row").items():
        assert layer.matrix.format == "bitmap" and not layer.training
        assert layer.matrix.dtype == torch.bfloat16
        counts = torch.count_nonzero(layer.to_dense(), 1)
        assert counts.tolist() == [layer.in_features // 2] * layer.out_features
        assert layer.bias is biases.get(f"{name}.bias")


def test_dense_weights_are_let_go():
    net = model()
    del net[0], net[1]
    memory = [p.untyped_storage()._weak_ref() for n, p in net.named_parameters() if "weight" in n]
    sparsify(net)
    assert all(torch.UntypedStorage._expired(one) for one in memory)


@pytest.mark.parametrize("filter", (None, "^a|c", "^b|c"))
def test_a_layer_in_several_places_is_swapped_in_all(filter):
    shared = nn.Linear(12, 12)
    net = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(12, 12)})
    swapped = sparsify(net, match=filter)
    assert set(swapped) == {"a", "b.0", "c"}
    assert net["a"] is net["b"][0] is swapped["a"] and net["c"] is not net["a"]


def test_refusals_leave_the_model_as_it_was():
    tied = nn.ModuleDict({"up": nn.Linear(5, 5), "embed": nn.Embedding(7, 5)})
    tied["head"] = nn.Linear(5, 7, bias=False)
    tied["head"].weight = tied["embed"].weight
    with pytest.raises(ValueError, match="head shares its weight with another module; leave it"):
        sparsify(tied)
    assert type(tied["up"]) is nn.Linear and set(sparsify(tied, match="up")) == {"up"}
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    with pytest.raises(TypeError, match=r"^1: dtype of a SparseLinear must be .*got torch.float64"):
        sparsify(mixed)
    assert type(mixed[0]) is nn.Linear
    with pytest.raises(TypeError, match=r"is an nn.Linear itself"):
        sparsify(nn.Linear(3, 3))


@pytest.mark.few(2)
@pytest.mark.parametrize("format", ["bitmap", "u8", "u2", "macko", "dense"])
def test_a_graph_holds_the_dense_matrix_of_a_layer(format):
    linear = nn.Linear(40, 24)
    layers = [SparseLinear.from_linear(linear, format=format, density=d) for d in (0.3, 0.6)]
    y = torch.randn(24, 3, requires_grad=True)
    for read in (lambda layer: layer.to_dense(), lambda layer: layer.weight):
        run = torch.compile(lambda layer, y, read=read: read(layer).mT @ y, fullgraph=True,
                            backend="aot_eager")  # fmt: skip
        for layer in layers:
            found = run(layer, y)
            torch.testing.assert_close(found, layer.to_dense().mT @ y)
            slope = torch.autograd.grad(found.sum(), y)[0]
            torch.testing.assert_close(slope[:, 0], layer.to_dense().sum(1))
    torch._dynamo.reset()
