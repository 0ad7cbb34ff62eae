"""SparseLinear as a module: compression, gradients, saving, and life in place of nn.Linear."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernlib as kl
from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import SparseMatrix, compress, magnitude
from tests.families.sparse.cases import FORMATS

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
        (0.5, TypeError, "filter must be a regular expression, .* got float"),
        (["0"], TypeError, "filter must be .* got list"),
        ("[", ValueError, "filter must be a regular expression, got '\\['"),
    ):
        with pytest.raises(error, match=words):
            sparsify(model, given)
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
        "linear", "format", "density", "per", "activation", "columns",
    ]  # fmt: skip
    assert list(inspect.signature(sparsify).parameters) == [
        "model", "filter", "density", "format", "per", "columns",
    ]  # fmt: skip


@each_format
@pytest.mark.parametrize("bias", (False, True))
def test_a_layer_is_the_linear_that_it_was_made_of(format, bias):
    plain = linear(bias)
    layer = SparseLinear.from_linear(plain, format)
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


def test_a_density_prunes_a_copy():
    plain = linear(density=None)
    before = plain.weight.detach().clone()
    layer = SparseLinear.from_linear(plain, density=0.25)
    assert torch.equal(plain.weight, before)
    assert torch.equal(layer.to_dense(), magnitude(before, 0.25))
    assert layer.matrix.nnz == round(0.25 * before.numel())
    rows = SparseLinear.from_linear(plain, density=0.25, per="row").to_dense()
    assert torch.count_nonzero(rows, 1).tolist() == [75] * 70


@pytest.mark.parametrize("activation", ("gelu", kl.Gelu("tanh"), (kl.Relu(), kl.Tanh())), ids=str)
def test_activations(activation):
    layer = SparseLinear.from_linear(linear(), "bitmap", activation=activation)
    plain = SparseLinear.from_linear(linear(), "bitmap")
    functions = {
        "gelu": F.gelu, "Gelu": lambda v: F.gelu(v, approximate="tanh"),
        "(": lambda v: torch.tanh(F.relu(v)),
    }  # fmt: skip
    name = next(n for n in functions if str(activation).startswith(n))
    wanted = functions[name](plain.float()(inputs(5).float()))
    close(layer(inputs(5)), wanted.half())
    assert f"activation={layer.activation[0]}" in repr(layer)


def test_a_matrix_and_a_plain_tensor_as_bias():
    matrix, bias = compress(linear().weight), torch.ones(70).half()
    layer = SparseLinear.from_matrix(matrix, bias)
    assert layer.matrix is matrix and isinstance(layer.bias, nn.Parameter)
    assert torch.equal(layer.bias, bias)
    assert SparseLinear.from_matrix(matrix).bias is None


WRONG = {
    "module": (lambda: SparseLinear.from_linear(nn.ReLU()), TypeError, "an nn.Linear, got ReLU"),
    "double": (lambda: SparseLinear.from_linear(linear().double()), TypeError, "got torch.float64"),
    "meta": (lambda: SparseLinear.from_linear(linear().to("meta")), ValueError, "on meta, without"),
    "format": (lambda: SparseLinear.from_linear(linear(), "csr"), ValueError, "format.*'csr'"),
    "density": (lambda: SparseLinear.from_linear(linear(), density=2), ValueError, "from 0 to 1"),
    "dtype": (lambda: SparseLinear(3, 4, dtype=torch.int8), TypeError, "got torch.int8"),
    "activation": (lambda: SparseLinear(3, 4, activation="sine"), ValueError, "'sine'"),
    "scale": (lambda: SparseLinear(3, 4, activation=kl.Scale()), ValueError, "needs the argument"),
    "tensor": (lambda: SparseLinear.from_matrix(torch.ones(3, 4)), TypeError, "got Tensor"),
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
    layer = SparseLinear.from_linear(copy.deepcopy(plain), format, activation=activation)
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
    layer = SparseLinear.from_linear(linear(dtype=torch.bfloat16), "bitmap")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(inputs(3, dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    close(y, layer(inputs(3, dtype=torch.bfloat16)), 1e-6)


def test_compiled_it_is_one_graph_whose_weights_stay_where_they_are():
    """Tensors that Dynamo does not know to be static would be copied at each replay."""
    layer, kinds = SparseLinear.from_linear(linear(), "bitmap", activation="silu"), []

    def backend(module, given):
        kinds.append([getattr(t, "_dynamo_static_input_type", None) for t in given])
        return module

    torch._dynamo.reset()
    compiled, x = torch.compile(layer, fullgraph=True, backend=backend), inputs(3)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    (found,) = kinds
    assert len(found) == 4 and [kind is None for kind in found].count(True) == 1  # x


def test_a_compiled_layer_records_gradients():
    torch._dynamo.reset()
    layer = SparseLinear.from_linear(linear(dtype=torch.float32), "bitmap")
    compiled, gradients = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
    for call in (compiled, layer):
        x = inputs(3, dtype=torch.float32).requires_grad_()
        gradients.append(torch.autograd.grad(call(x).square().sum(), (x, layer.bias)))
    for ours, wanted in zip(*gradients, strict=True):
        close(ours, wanted, 1e-5)


def test_functional_call_takes_other_tensors():
    layer, others = SparseLinear.from_linear(linear(), "bitmap"), linear(density=0.8)
    with torch.no_grad():
        for weight in (torch.zeros_like(others.weight), others.weight):
            given = compress(weight, "bitmap").tensors
            given = {f"weight_{name}": tensor for name, tensor in given.items()}
            found = torch.func.functional_call(layer, given, (inputs(2),))
            close(found, F.linear(inputs(2), weight, layer.bias), 1e-3)
    with pytest.raises(ValueError, match="no matrix of kind 'bitmap 70x300 float16': data must"):
        empty = {"weight_data": torch.zeros_like(layer.weight_data)}  # values without a place
        torch.func.functional_call(layer, empty, (inputs(2),))
    assert torch.equal(layer.to_dense(), linear().weight)


# Saving and moving.


@each_format
def test_a_state_dict_loads_into_every_layer_of_the_size(format):
    layer = SparseLinear.from_linear(linear(), format)
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
        SparseLinear.from_linear(linear(density=0.9), "bitmap"),
        SparseLinear.from_linear(linear(density=0.01), "dense"),
        SparseLinear.from_linear(linear(), format).to("meta").to_empty(device="cpu"),
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
    layer = SparseLinear.from_linear(linear(), "bitmap")
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.device("meta"):
        target = SparseLinear(300, 70)
    target.load_state_dict(state, assign=True)
    assert target.weight_data.data_ptr() == state["weight_data"].data_ptr()
    assert torch.equal(target(inputs(2)), layer(inputs(2)))
    other = SparseLinear.from_linear(linear(dtype=torch.float32), "dense")
    other.load_state_dict(state)  # into the dtype of the layer
    assert other.matrix.dtype == torch.float32 and other.matrix.format == "bitmap"
    assert torch.equal(other.to_dense(), layer.to_dense().float())


def test_a_state_dict_within_a_model():
    plain = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 70)).half()
    magnitude(plain[0].weight, 0.1, inplace=True)
    model, empty = copy.deepcopy(plain), nn.Sequential(*plain)
    sparsify(model, "^0")
    empty[0] = SparseLinear(300, 300, dtype=torch.float16)
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(inputs(3)), model(inputs(3)))


BROKEN = {
    "version": (dict(version=99), "version 99"),
    "format": (dict(format="csr"), "format"),
    "shape": (dict(shape=[70, 299]), None),
    "dtype": (dict(dtype="int8"), "dtype must be one of"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_header_names_the_layer(case):
    changed, message = BROKEN[case]
    model = nn.ModuleDict({"up": SparseLinear.from_linear(linear(), "bitmap")})
    state = model.state_dict()
    header = json.loads(bytes(state["up._extra_state"].tolist())) | changed
    state["up._extra_state"] = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=f"up: .*{message or ''}"):
        model.load_state_dict(state)


def test_what_cannot_be_loaded():
    layer = SparseLinear.from_linear(linear(), "bitmap")
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r"has shape \(70, 300\), that of the layer has"):
        SparseLinear(300, 71).load_state_dict(state)
    with pytest.raises(RuntimeError, match="saved of an empty SparseLinear"):
        layer.load_state_dict(SparseLinear(300, 70).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        layer.load_state_dict({"bias": state["bias"]})
    with pytest.raises(RuntimeError, match="data, offsets, got offsets"):
        layer.load_state_dict({k: v for k, v in state.items() if k != "weight_data"})
    with pytest.raises(RuntimeError, match="no header of a SparseLinear"):
        layer.load_state_dict({**state, "_extra_state": torch.zeros(3)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        layer.load_state_dict({**state, "other": torch.zeros(3)})
    assert torch.equal(layer.to_dense(), linear().weight)


@each_format
def test_copies_and_pickles(format):
    layer, x = SparseLinear.from_linear(linear(), format, activation="relu"), inputs(3)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x)) and other.activation == layer.activation
        pairs = zip(other.matrix.operands, layer.matrix.operands, strict=True)
        assert all(a.data_ptr() != b.data_ptr() for a, b in pairs if a.numel())
        held = [getattr(other, f"weight_{name}") for name in other.matrix.tensors]
        assert all(a is b for a, b in zip(held, other.matrix.operands, strict=True))


@each_format
def test_another_dtype_rounds_the_values(format):
    layer = SparseLinear.from_linear(linear(), format)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        other = copy.deepcopy(layer).to(dtype)
        assert other.matrix.dtype == other.bias.dtype == dtype
        assert torch.equal(other.to_dense(), linear().weight.to(dtype))
        assert other(inputs(2, dtype=dtype)).dtype == dtype
    with pytest.raises(TypeError, match=r"holds float32, .*got torch\.float64"):
        layer.double()
    with pytest.raises(TypeError, match="on meta has no values to turn from"):
        copy.deepcopy(layer).to("meta").bfloat16()


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_type_for_everything_leaves_whole_numbers_whole(format, dtype):
    """``Module.type`` casts every buffer, ``Module.to`` those of floats alone."""
    layer, x = SparseLinear.from_linear(linear(), format), inputs(3, dtype=dtype)
    wanted = copy.deepcopy(layer).to(dtype)
    typed = torch.nn.Sequential(layer).type(dtype)[0]
    assert torch.equal(typed(x), wanted(x)) and typed.matrix.dtype == dtype
    for one, other in zip(typed.matrix.operands, wanted.matrix.operands, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@each_format
def test_a_shallow_copy_leaves_the_layer_as_it_was(format):
    layer, x = SparseLinear.from_linear(linear(), format), inputs(3)
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
    layer = SparseLinear.from_linear(linear(), "bitmap")
    nnz = layer.matrix.nnz
    moved = copy.deepcopy(layer).to("meta")
    assert moved.matrix.device.type == "meta" and moved.matrix.nnz == nnz
    assert "density" not in repr(moved) and moved(inputs(3).to("meta")).shape == (3, 70)


# In place of nn.Linear.


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 12, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(12, 12)

    def forward(self, x):
        weights = torch.softmax(self.q_proj(x) @ self.k_proj(x).mT, -1)
        return self.o_proj(weights @ self.v_proj(x))


def model(**factory) -> nn.Sequential:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 12))
    return nn.Sequential(Attention(), mlp, nn.Linear(12, 5)).to(**factory)


def names(module: nn.Module, kind: type) -> set[str]:
    return {name for name, part in module.named_modules() if type(part) is kind}


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
    swapped = sparsify(net, filter)
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
    swapped = sparsify(net, filter)
    assert set(swapped) == {"a", "b.0", "c"}
    assert net["a"] is net["b"][0] is swapped["a"] and net["c"] is not net["a"]


def test_what_derives_from_linear_stays():
    attention = nn.MultiheadAttention(12, 3)
    assert sparsify(attention) == {}


def test_refusals_leave_the_model_as_it_was():
    tied = nn.ModuleDict({"up": nn.Linear(5, 5), "embed": nn.Embedding(7, 5)})
    tied["head"] = nn.Linear(5, 7, bias=False)
    tied["head"].weight = tied["embed"].weight
    with pytest.raises(ValueError, match="head shares its weight with another module; leave it"):
        sparsify(tied)
    assert type(tied["up"]) is nn.Linear and set(sparsify(tied, "up")) == {"up"}
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    with pytest.raises(TypeError, match=r"^1: a SparseLinear holds .*got torch.float64"):
        sparsify(mixed)
    with pytest.raises(ValueError, match=r"^2: the weight is on meta"):
        sparsify(model(device="meta"))
    assert type(mixed[0]) is nn.Linear
    with pytest.raises(TypeError, match=r"is an nn.Linear itself"):
        sparsify(nn.Linear(3, 3))


def test_a_layer_holds_a_matrix_of_kernlib():
    layer = SparseLinear.from_linear(linear())
    assert type(layer.matrix) is SparseMatrix
    assert torch.equal(kl.sparse.matmul(layer.matrix, inputs(2), bias=layer.bias), layer(inputs(2)))


# Tensors that are no matrix.


@each_format
def test_pickled_layers_are_looked_at(format):
    made = SparseLinear.from_linear(linear(), format)
    assert torch.equal(copy.deepcopy(made).to_dense(), made.to_dense())
    if format == "dense":
        return
    name = {"bitmap": "offsets", "macko": "row_ptr"}.get(format, "rows")
    made._buffers[f"weight_{name}"].view(torch.uint8).fill_(201)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    with pytest.raises(ValueError, match=name):
        torch.load(file, weights_only=False)
    with pytest.raises(ValueError, match=name):
        copy.deepcopy(made)


@pytest.mark.parametrize("format", ["u8", "u4", "u2"])
def test_layers_pickled_with_rows_of_two_bytes_load(format):
    made = SparseLinear.from_linear(linear(), format)
    old = SparseLinear.from_linear(linear(), format)
    old._buffers["weight_rows"] = old._buffers["weight_rows"].view(torch.int16)
    again = pickle.loads(pickle.dumps(old))
    assert again._buffers["weight_rows"].dtype == torch.uint8
    assert torch.equal(again.to_dense(), made.to_dense())


@each_format
@pytest.mark.parametrize("via", ["meta", "cpu"])
def test_a_layer_made_empty_holds_no_matrix(format, via):
    made = SparseLinear.from_linear(linear(), format)
    state = copy.deepcopy(made.state_dict())
    model = nn.Sequential(made).to(via).to_empty(device="cpu")
    assert made.extra_repr().endswith("empty")
    with pytest.raises(RuntimeError, match="is empty: load a state_dict"):
        model(inputs(2))
    made.load_state_dict(state)
    assert torch.equal(made.to_dense(), linear().weight)


def test_headers_that_nest_too_deep_or_lie_nowhere_are_refused():
    made = SparseLinear.from_linear(linear())
    state = made.state_dict()
    deep = torch.tensor(list(b"[" * 100_000), dtype=torch.uint8)
    for wrong in (deep, state["_extra_state"].to("meta"), torch.zeros(3), None):
        with pytest.raises(RuntimeError, match="no header of a SparseLinear"):
            made.load_state_dict({**state, "_extra_state": wrong})


WRONG_OPTIONS = {
    "format": ("nosuch", ValueError, "format must be 'auto' or one of"),
    "per": ("nonsense", ValueError, "per must be one of matrix, row"),
    "columns": (0, ValueError, "columns must be"),
    "density": ("0.5", TypeError, "density must be a number from 0 to 1"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_options_are_checked_where_they_are_not_used(name):
    value, error, words = WRONG_OPTIONS[name]
    for model in (nn.Sequential(), nn.Sequential(linear())):
        with pytest.raises(error, match=words):
            sparsify(model, filter="none", **{name: value})
    with pytest.raises(error, match=words):
        SparseLinear.from_linear(linear(), **{name: value})
