"""SparseLinear where something is wrong or unusual: states, tensors, arguments, torch's defaults,
the promise."""

import copy
import io
import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

from kernlib.descriptors import nesting
from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import compress, magnitude
from tests.families.sparse.cases import FORMATS
from tests.nn.layer_writes import former_state
from tests.support.defaults import SURROUNDINGS

each_format = pytest.mark.parametrize("format", FORMATS)


def linear(dtype=torch.float16, rows=70, cols=300) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(cols, rows, dtype=dtype, device="cpu")
    magnitude(made.weight, 0.3, inplace=True)
    return made


# States without a weight.


def test_a_state_without_a_weight_says_that_it_was_not_loaded():
    layer, bias = SparseLinear.from_linear(linear()), torch.full((70,), 2.0).half()
    dense = layer.to_dense()
    former = former_state(layer)
    del former["_extra_state"]
    keys = layer.load_state_dict({**former, "bias": bias}, strict=False)
    assert sorted(keys.unexpected_keys) == sorted(k for k in former if k != "bias")
    assert keys.missing_keys == ["weight_packed"]
    assert torch.equal(layer.to_dense(), dense) and torch.equal(layer.bias, bias)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_packed.*\n.*Unexpected key"):
        layer.load_state_dict(former)


def test_in_a_model_the_names_are_whole():
    up = SparseLinear.from_linear(linear(), format="bitmap")
    model = nn.ModuleDict({"up": up, "norm": nn.Tanh()})
    keys = model.load_state_dict({"up.bias": model["up"].bias}, strict=False)
    assert keys.missing_keys == ["up.weight_packed"] and not keys.unexpected_keys
    whole = model.load_state_dict(model.state_dict(), strict=False)
    assert not whole.missing_keys and not whole.unexpected_keys


# States and tensors that are no matrix.


def changed(state: torch.Tensor, **header) -> torch.Tensor:
    """A packed matrix with another header."""
    size = int.from_bytes(bytes(state[8:16].tolist()), "little")
    text = json.dumps(json.loads(bytes(state[16 : 16 + size].tolist())) | header).encode()
    head = b"kernlib\x01" + len(text).to_bytes(8, "little") + text
    head = head.ljust(-(-len(head) // 64) * 64, b"\0")
    rest = state[-(-(16 + size) // 64) * 64 :]
    return torch.cat([torch.tensor(list(head), dtype=torch.uint8), rest])


def headed(text: bytes, size: int | None = None) -> torch.Tensor:
    size = len(text) if size is None else size
    head = b"kernlib\x01" + size.to_bytes(8, "little") + text
    return torch.tensor(list(head), dtype=torch.uint8)


BROKEN = {
    "version": (lambda p: changed(p, version=99), "version 99"),
    "format": (lambda p: changed(p, format="csr"), "format"),
    "shape": (lambda p: changed(p, shape=[70, 299]), ""),
    "dtype": (lambda p: changed(p, dtype="int8"), "dtype must be one of"),
    "no tensors": (lambda p: changed(p, tensors=[]), "no places of tensors"),
    "no place": (lambda p: changed(p, tensors={"data": 3}), "data of a packed matrix must lie"),
    "far place": (
        lambda p: changed(p, tensors={"data": ["float16", [2**62, 8], 0]}), "data of .* must lie",
    ),
    "odd place": (
        lambda p: changed(p, tensors={"data": ["float16", [1], 2]}), "data of .* must lie",
    ),
    "before": (lambda p: changed(p, tensors={"data": ["uint8", [1], -64]}), "data of .* must lie"),
    "part": (lambda p: p[:-64], "must lie in its"),
    "empty": (lambda p: p[:0], "saved of an empty SparseLinear"),
    "short": (lambda p: p[:9], "do not begin as a packed matrix does"),
    "other bytes": (lambda p: p.roll(1), "do not begin as a packed matrix does"),
    "long header": (lambda p: headed(b"{}", 2**62), "must end within it"),
    "no text": (lambda p: headed(b"\xff\xfe"), "is damaged"),
    "no mapping": (lambda p: headed(b"[]"), "must be a mapping"),
    "deep": (lambda p: headed(b"[" * 4097), "must end within it"),
    "dtype of bytes": (lambda p: p.float(), "a tensor .n,. of uint8, got torch.float32"),
    "no tensor": (lambda p: "bytes", "a tensor .n,. of uint8, got str"),
    "meta": (lambda p: p.to("meta"), "on meta has no values"),
    "expanded": (lambda p: p[:1].expand(2**40), "must have memory for each"),
}  # fmt: skip


@pytest.mark.few(100)
@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_state_names_the_layer(case):
    change, message = BROKEN[case]
    model = nn.ModuleDict({"up": SparseLinear.from_linear(linear(), format="bitmap")})
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=f"up: .*{message}"):
        model.load_state_dict({**state, "up.weight_packed": change(state["up.weight_packed"])})
    assert torch.equal(model["up"].to_dense(), linear().weight)


def test_what_cannot_be_loaded():
    layer = SparseLinear.from_linear(linear(), format="bitmap")
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r"has shape \(70, 300\), that of the layer has"):
        SparseLinear(300, 71).load_state_dict(state)
    with pytest.raises(RuntimeError, match="saved of an empty SparseLinear"):
        layer.load_state_dict(SparseLinear(300, 70).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_packed"):
        layer.load_state_dict({"bias": state["bias"]})
    former = former_state(layer)
    with pytest.raises(RuntimeError, match="data, offsets, got offsets"):
        layer.load_state_dict({k: v for k, v in former.items() if k != "weight_data"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        layer.load_state_dict({**state, "other": torch.zeros(3)})
    assert torch.equal(layer.to_dense(), linear().weight)


@each_format
def test_pickled_layers_are_looked_at(format):
    made = SparseLinear.from_linear(linear(), format=format)
    assert torch.equal(copy.deepcopy(made).to_dense(), made.to_dense())
    if format == "dense":
        return
    name = {"bitmap": "offsets", "macko": "row_ptr"}.get(format, "rows")
    getattr(made, f"weight_{name}").view(torch.uint8).fill_(201)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    with pytest.raises(ValueError, match=name):
        torch.load(file, weights_only=False)
    with pytest.raises(ValueError, match=name):
        copy.deepcopy(made)


@each_format
@pytest.mark.parametrize("via", ["meta", "cpu"])
def test_a_layer_made_empty_holds_no_matrix(format, via):
    made = SparseLinear.from_linear(linear(), format=format)
    state = copy.deepcopy(made.state_dict())
    model = nn.Sequential(made).to(via).to_empty(device="cpu")
    assert made.extra_repr().endswith("empty")
    with pytest.raises(RuntimeError, match="is empty: load a state_dict"):
        model(torch.ones(2, 300).half())
    made.load_state_dict(state)
    assert torch.equal(made.to_dense(), linear().weight)


def test_headers_too_long_or_too_deep_or_nowhere_are_refused():
    made = SparseLinear.from_linear(linear())
    state = former_state(made)
    deep = torch.tensor(list(b"[" * (nesting.DEEPEST + 1)), dtype=torch.uint8)
    blanks = torch.full((nesting.LONGEST,), ord(" "), dtype=torch.uint8)
    long = torch.cat([state["_extra_state"], blanks])
    for wrong in (deep, long, state["_extra_state"].to("meta"), torch.zeros(3), None):
        with pytest.raises(RuntimeError, match="no header of a matrix"):
            made.load_state_dict({**state, "_extra_state": wrong})


# Arguments.


WRONG_OPTIONS = {
    "format": ("nosuch", ValueError, "format must be 'auto' or one of"),
    "per": ("nonsense", ValueError, "per must be one of matrix, row"),
    "columns": (0, ValueError, "columns must be"),
    "density": ("0.5", TypeError, "density must be a number from 0 to 1"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_options_are_checked_where_they_are_not_used(name):
    value, error, words = WRONG_OPTIONS[name]
    for plain in (nn.Sequential(), nn.Sequential(linear())):
        with pytest.raises(error, match=words):
            sparsify(plain, match="none", **{name: value})
    with pytest.raises(error, match=words):
        SparseLinear.from_linear(linear(), **{name: value})


class Odd(nn.Linear):
    """A layer whose weight is whatever is put there."""

    def __init__(self, weight):
        nn.Module.__init__(self)
        self.weight, self.bias = weight, None


NESTED = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
MATRIX = compress(torch.eye(4).half())
WRONG = {
    "huge": (lambda: SparseLinear(4, 2**70), ValueError, "out_features must be an int of at least"),
    "no weight": (lambda: SparseLinear.from_linear(Odd(None)), TypeError, "must be a tensor"),
    "vector": (
        lambda: SparseLinear.from_linear(Odd(nn.Parameter(torch.ones(3)))), ValueError,
        r"the weight must be a matrix \(out_features, in_features\), got shape \(3,\)",
    ),
    "nested": (lambda: SparseLinear.from_linear(Odd(NESTED)), ValueError, "got a nested tensor"),
    "lazy": (lambda: SparseLinear.from_linear(nn.LazyLinear(3)), ValueError, "not been called"),
    "sparse bias": (
        lambda: SparseLinear.from_matrix(MATRIX, torch.ones(4).half().to_sparse()), TypeError,
        "bias must be a dense tensor",
    ),
    "deep match": (
        lambda: sparsify(nn.Sequential(), match="(" * 9999), ValueError, "match .* is no regular"
    ),
    "long filter": (
        lambda: sparsify(nn.Sequential(), match="a{99999999999999999999}"), ValueError,
        "match .* is no regular",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as found:
        make()
    assert len(str(found.value)) < 400


# torch's defaults, which decide nothing of a layer that has a weight.


@pytest.mark.parametrize("where", SURROUNDINGS)
@each_format
def test_a_layer_follows_its_weight(format, where):
    plain, x = linear(torch.float32), torch.randn(3, 300)
    layer = SparseLinear.from_linear(plain, format=format)
    wanted, state = layer(x), layer.state_dict()
    like = torch.zeros(70)
    with SURROUNDINGS[where]():
        made = SparseLinear.from_linear(plain, format=format)
        assert all(torch.equal(v, made.state_dict()[k]) for k, v in state.items())
        for other in (made, SparseLinear.from_matrix(layer.matrix, like)):
            other.load_state_dict(state)
            assert torch.equal(other(x), wanted) and other.matrix.dtype == torch.float32
        model = nn.Sequential(plain, nn.ReLU())
        (swapped,) = sparsify(model, density=0.2, format=format).values()
        assert swapped.matrix.device.type == "cpu" and "density=0.2" in repr(swapped)
        assert torch.equal(layer.half().to_dense(), plain.weight.half())


# The promise.


@each_format
def test_a_layer_is_frozen_when_it_is_told_to_be(format):
    layer, x = SparseLinear.from_linear(linear(), format=format).eval(), torch.ones(300).half()
    wanted = layer(x)
    assert not layer.matrix.frozen and not layer.train().eval().matrix.frozen
    assert layer.freeze() is layer and layer.matrix.frozen and torch.equal(layer(x), wanted)
    assert layer.train().matrix.frozen
    first = f"weight_{next(iter(layer.matrix.tensors))}"
    getattr(layer, first).add_(0)
    with pytest.raises(RuntimeError, match=r"written or moved after freeze\(\)"):
        layer(x)
    assert layer.thaw() is layer and torch.equal(layer(x), wanted)
    layer.freeze().load_state_dict(layer.state_dict())
    assert not layer.matrix.frozen and torch.equal(layer(x), wanted)
    assert not layer.freeze().bfloat16().matrix.frozen
    with pytest.raises(RuntimeError, match="is empty: load a state_dict"):
        SparseLinear(3, 4).freeze()


# Weights that are computed, which layers hold as of their last call.


def masked(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.l1_unstructured(layer, "bias", 0.5)
    return layer


@pytest.mark.few(100)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", [masked, nn.utils.weight_norm, nn.utils.spectral_norm])
def test_computed_weights_are_those_of_what_was_loaded(wrap, seed):
    model, trained = (nn.Sequential(wrap(nn.Linear(40, 24))) for _ in range(2))
    x = torch.randn(3, 40)
    wanted = trained.eval()(x)
    model.load_state_dict(trained.state_dict())
    layer = SparseLinear.from_linear(model[0], format="u8")
    torch.testing.assert_close(layer(x), wanted)
    sparsify(model.bfloat16(), format="u8")
    assert model[0].matrix.dtype == model[0].bias.dtype == torch.bfloat16
    wanted = trained.bfloat16()(x.bfloat16())  # by a norm of numbers that are rounded too
    torch.testing.assert_close(model(x.bfloat16()), wanted, rtol=0.05, atol=0.05)


def without_memory(layer: nn.Linear) -> None:
    layer.weight = FakeTensorMode().from_tensor(layer.weight)


def with_a_wide_bias(layer: nn.Linear) -> None:
    layer.half().bias = nn.Parameter(torch.zeros(16))


def with_a_short_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.zeros(1))


def sparsely(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())


@pytest.mark.few(by="case")
@pytest.mark.parametrize(
    "case",
    [
        (without_memory, ValueError, r"1: the weight of linear is a .*FakeTensor"),
        (with_a_wide_bias, TypeError, r"1: bias must be torch\.float16 as the matrix is"),
        (with_a_short_bias, ValueError, r"1: bias must have shape \(16,\), got \(1,\)"),
        (sparsely, TypeError, "1: the weight must be a dense tensor"),
    ],
)
def test_the_second_layer_is_looked_at_before_the_first_is_swapped(case):
    spoil, error, message = case
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    spoil(model[1])
    with pytest.raises(error, match=message):
        sparsify(model, density=0.5)
    assert all(type(layer) is nn.Linear for layer in model)


@pytest.mark.parametrize("padded", [False, True])
def test_encoders_of_torch_call_their_layers_in_evaluation_too(padded, monkeypatch):
    """Their fused path would lay out the weights at each call."""
    part = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(part, 2).eval()
    swapped = sparsify(model, match=r"linear[12]", density=0.5)
    x, options = torch.randn(3, 16, 32), {}
    if padded:
        options["src_key_padding_mask"] = (torch.arange(16) > 10).expand(3, -1)
    monkeypatch.setattr(SparseLinear, "to_dense", None)
    called = []
    for layer in swapped.values():
        layer.register_forward_hook(lambda *given: called.append(given[0]))
    with torch.no_grad():
        found = model(x, **options)
    assert called == list(swapped.values())
    torch.testing.assert_close(found, model(x, **options).detach())
