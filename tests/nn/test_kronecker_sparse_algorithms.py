"""All six algorithms of KSLinear give the product of the index formula, by what they derive of a
weight or by what they kept of it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import kernlib as kl
import kernlib.nn.kronecker_sparse as implementation
from kernlib.errors import CompileError, UnsupportedError
from kernlib.families.kronecker_sparse import reference
from kernlib.nn.kronecker_sparse_algorithms import ALGORITHMS, STORAGE
from tests.nn.kronecker_sparse_cases import (
    ALGOS,
    CHAIN,
    LAYOUTS,
    PATTERNS,
    error,
    expected,
    inputs,
    layer,
    random,
)

DERIVING = tuple(STORAGE)
BATCHES = [(), (1,), (0,), (5,), (2, 3), (2, 0), (3, 1, 2)]
each_algo = pytest.mark.parametrize("algo", ALGOS)
each_layout = pytest.mark.parametrize("bs_last", LAYOUTS, ids=["first", "last"])


@each_layout
@each_algo
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_algorithm_is_the_index_formula(pattern, algo, bs_last):
    made = layer(pattern, algo, bs_last)
    for batch in BATCHES:
        x = inputs(made, *batch)
        wanted = expected(made, x)
        for recorded in (True, False, False):  # the last from what was kept
            with torch.set_grad_enabled(recorded):
                found = made(x)
            assert found.is_contiguous() and found.requires_grad == recorded
            torch.testing.assert_close(found, wanted)


# Where the index of a column is the same in every row, or there is one of it.
FLAT = [
    (1, 1536, 384, 1),
    (1, 2, 1, 1),
    (1, 1, 7, 1),
    (1, 48, 48, 2),
    (6, 64, 256, 1),
    (1, 4, 4, 3),
]
LAID = {
    "plain": lambda weight: weight,
    "transposed": lambda weight: weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "expanded": lambda weight: weight[:1, :1, :, :1].expand(weight.shape),
    "sliced": lambda weight: weight.repeat_interleave(2, 2)[:, :, ::2],
}


@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("algo", ["sparse", "bsr"])
@pytest.mark.parametrize("pattern", [*FLAT, *PATTERNS], ids=str)
def test_what_is_stored_of_a_weight_can_be_read(pattern, algo, laid):
    weight = LAID[laid](random(*pattern, dtype=torch.float32))
    stored = STORAGE[algo](weight)
    parts = stored.crow_indices(), stored.col_indices(), stored.values()
    assert all(part.is_contiguous() for part in parts)
    torch._validate_sparse_compressed_tensor_args(*parts, stored.shape, stored.layout)
    dense = reference.dense(pattern, weight.double())
    for bs_last in LAYOUTS:
        x = random(stored.shape[1], 5, dtype=torch.float32)
        x = x if bs_last else x.mT
        wanted = dense @ x.double() if bs_last else x.double() @ dense.mT
        for given in (stored, None):
            found = ALGORITHMS[algo](x, weight, pattern, bs_last, given)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@each_layout
@each_algo
def test_a_chain_is_the_product_of_its_factors(algo, bs_last):
    made = layer(CHAIN, algo, bs_last)
    for batch in BATCHES:
        x = inputs(made, *batch)
        torch.testing.assert_close(made(x), expected(made, x))


@each_algo
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 5, 127, 129, 25089])
def test_any_batch(batch, algo):
    for bs_last in LAYOUTS:
        made = layer((2, 3, 5, 2), algo, bs_last, torch.float32)
        x = inputs(made, batch)
        torch.testing.assert_close(made(x).double(), expected(made, x), rtol=1e-5, atol=1e-5)


@each_algo
@pytest.mark.parametrize(
    "pattern",
    [(1, 7, 514, 1), (1, 100, 14, 2), (3, 10, 3, 7), (2, 20, 8, 1), (1, 1, 100, 3), (7, 14, 10, 1)],
    ids=str,
)
def test_any_size(pattern, algo):
    made = layer(pattern, algo, dtype=torch.float32)
    x = inputs(made, 3)
    assert error(made(x), expected(made, x)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_algo
def test_half_types_accumulate_in_float32(algo, dtype):
    bound = {torch.float16: 3e-4, torch.bfloat16: 3e-3}[dtype]  # the rounding of the result alone
    for c in (48, 192, 1024):
        made = layer((1, 8, c, 2), algo, dtype=dtype, bias=False)
        x = inputs(made, 16)
        with torch.no_grad():
            found = made(x)
        assert found.dtype == dtype
        assert error(found, expected(made, x)) < bound, c


@pytest.mark.parametrize("algo", ["sparse", "bsr"])
def test_sparse_matrices_of_half_types_are_stored_in_float32_on_every_device(algo):
    """Torch's products of CSR in bfloat16 are wrong on GPUs."""
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.empty(1, 2, 4, 3, dtype=dtype, device="meta")
        assert STORAGE[algo](weight).dtype == torch.float32


@each_layout
@each_algo
def test_strides_do_not_matter(algo, bs_last):
    made = layer((2, 3, 5, 4), algo, bs_last)
    whole = inputs(made, 4, 6)
    views = {
        "transposed": whole.transpose(1, 2) if bs_last else whole.transpose(0, 1),
        "batch sliced": whole[:, ::2, 1:] if bs_last else whole[::2, 1:],
        "features apart": random(*whole.shape, 2)[..., 0],
        "features backwards": random(*reversed(whole.shape)).permute(2, 1, 0),
        "expanded": inputs(made, 1, 1).expand(*([-1, 4, 6] if bs_last else [4, 6, -1])),
    }
    for name, x in views.items():
        assert not x.is_contiguous(), name
        torch.testing.assert_close(made(x), made(x.contiguous()), msg=name)


# Bias and activation.

ACTIVATIONS = {
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    kl.Gelu("tanh"): lambda v: F.gelu(v, approximate="tanh"),
    kl.LeakyRelu(0.3): lambda v: F.leaky_relu(v, 0.3),
    (kl.Tanh(), kl.Relu()): lambda v: F.relu(torch.tanh(v)),
    kl.Custom("v * v + 1"): lambda v: v * v + 1,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bs_last", LAYOUTS)
@pytest.mark.parametrize("algo", ["kernel", "einsum"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation, algo, bs_last, bias):
    made = layer(CHAIN[:2], algo, bs_last, activation=activation, bias=bias)
    x = inputs(made, 3, 2)
    torch.testing.assert_close(made(x), ACTIVATIONS[activation](expected(made, x)))


@pytest.mark.parametrize("patterns", [CHAIN[:1], CHAIN], ids=["factor", "chain"])
def test_bias_and_activation_are_the_epilogue_of_one_call(monkeypatch, patterns):
    calls = []
    run = implementation.run_kernel

    def count(descriptor, x, *weights, **parameters):
        calls.append((descriptor, sorted(parameters)))
        return run(descriptor, x, *weights, **parameters)

    monkeypatch.setattr(implementation, "run_kernel", count)
    made = layer(patterns, "kernel", activation="relu", precision="tf32")
    x = inputs(made, 3)
    torch.testing.assert_close(made(x), expected(made, x).relu())
    ((descriptor, parameters),) = calls
    last = descriptor.factors[-1] if len(patterns) > 1 else descriptor
    assert last.epilogue == (kl.Bias(), kl.Relu()) and parameters == ["bias"]
    assert last.precision == "tf32"
    made.bias = None
    made(x)
    assert calls[1][1] == []


# "auto".


def test_auto_is_the_einsum_on_the_cpu():
    made, wanted = layer(CHAIN), layer(CHAIN, "einsum")
    x = inputs(made, 3)
    assert made.algo == "auto" and torch.equal(made(x), wanted(x))


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda:0"))


@pytest.mark.parametrize("refusal", [UnsupportedError("too old"), CompileError("refused")])
def test_auto_falls_back_to_the_einsum_once_and_says_so(monkeypatch, refusal):
    calls = []

    def refuse(*arguments, **parameters):
        calls.append(arguments)
        raise refusal

    monkeypatch.setattr(implementation, "run_kernel", refuse)
    made = layer(CHAIN)
    plain = inputs(made, 3)
    x = plain.as_subclass(OnGpu)
    with pytest.warns(UserWarning, match=f"einsum on cuda:0: {refusal.args[0]}"):
        torch.testing.assert_close(made(x).as_subclass(torch.Tensor), expected(made, plain))
    made(x)
    made(2 * x)
    assert len(calls) == 1
    made.algo = "kernel"
    with pytest.raises(type(refusal)):
        made(x)


def refuse_above(monkeypatch, batch):
    """A kernel that takes only so large a batch; answers the batches that it was asked for."""
    asked, run = [], implementation.run_kernel

    def limited(descriptor, x, *arguments, **parameters):
        asked.append(len(x))
        if len(x) > batch:
            raise UnsupportedError(f"{len(x)} rows are more than one launch holds")
        plain = x.as_subclass(torch.Tensor)
        return run(descriptor, plain, *arguments, **parameters).as_subclass(OnGpu)

    monkeypatch.setattr(implementation, "run_kernel", limited)
    return asked


def test_a_batch_that_is_refused_condemns_no_other(monkeypatch):
    asked = refuse_above(monkeypatch, 5)
    made = layer(CHAIN)
    x = inputs(made, 9)
    for batch, refused in ((3, 0), (9, 1), (3, 0), (9, 0), (5, 0), (7, 1), (9, 0), (7, 0)):
        part = x[:batch].as_subclass(OnGpu)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = made(part).as_subclass(torch.Tensor)
        torch.testing.assert_close(found, expected(made, x[:batch]))
        assert len(said) == refused
    assert asked == [3, 9, 3, 5, 7]


@pytest.mark.filterwarnings("ignore:KSLinear takes the einsum")
def test_refusals_that_are_remembered_are_bounded_and_forgotten(monkeypatch):
    asked = refuse_above(monkeypatch, 0)
    monkeypatch.setattr(implementation, "REFUSALS", 2)
    made = layer(CHAIN)
    x = inputs(made, 3).as_subclass(OnGpu)
    for batch in (1, 2, 1, 3, 3, 1, 2, 3):
        made(x[:batch])
    assert asked == [1, 2, 3, 1, 2, 3]  # two are remembered, never three
    made.algo = "auto"
    made(x[:1])
    assert asked == [1, 2, 3, 1, 2, 3, 1]
    copy.deepcopy(made)(x[:1])
    made(x[:1])
    assert asked == [1, 2, 3, 1, 2, 3, 1, 1]


@pytest.mark.filterwarnings("ignore:KSLinear takes the einsum")
def test_a_refusal_leaves_symbolic_sizes_alone(monkeypatch):
    asked = refuse_above(monkeypatch, 0)
    made = layer(CHAIN)
    x = inputs(made, 3)
    for _ in range(2):
        made(x.as_subclass(OnGpu))
    assert asked == [3]  # the refusal is remembered
    shapes = []

    def look(x):
        shapes.append(x.shape)
        refused = {(x.device, x.dtype, torch.Size([3, made.in_features]))}
        assert not implementation.is_among(refused, x)
        return x + 1

    make_fx(look, tracing_mode="symbolic")(x)
    assert isinstance(shapes[0][0], torch.SymInt)
