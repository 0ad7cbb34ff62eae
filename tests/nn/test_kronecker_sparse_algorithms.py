"""All six algorithms of KSLinear give the product of the index formula, by what they derive of a
weight or by what they kept of it."""

from __future__ import annotations

import copy
import gc
import operator
import warnings
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

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
    noted_storage,
    product,
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


# What is kept.


@pytest.mark.parametrize(
    "algo, promised", [*((a, True) for a in DERIVING), *((a, False) for a in DERIVING[1:])]
)
def test_storage_is_kept_while_a_frozen_weight_is_what_it_was(algo, promised, monkeypatch):
    made, stored = layer(CHAIN, algo).requires_grad_(False), noted_storage(monkeypatch)
    made = made.freeze() if promised else made.freeze().thaw()
    x = inputs(made, 3)
    with torch.no_grad():
        made(x)
        kept = [*stored]
        made(x)
    assert len(kept) == len(CHAIN) and None not in kept
    assert all(map(operator.is_, stored, (*kept, *kept)))


COUNTED = {
    "in place": lambda made: made.factors[0].mul_(2),
    "a slice": lambda made: made.factors[0][0].zero_(),
    "data": lambda made: setattr(made.factors[0], "data", 3 * made.factors[0].data),
    "data twice": lambda made: [
        setattr(made.factors[0], "data", k * made.factors[0].detach().clone()) for k in (2, 3)
    ],
    "parameter": lambda made: made.factors.__setitem__(
        0, torch.nn.Parameter(made.factors[0].detach() + 1)
    ),
    "loaded": lambda made: made.load_state_dict(layer(CHAIN, seed=5).state_dict()),
    "assigned": lambda made: made.load_state_dict(layer(CHAIN, seed=5).state_dict(), assign=True),
    "reset": lambda made: made.reset_parameters(),
    "dtype and back": lambda made: made.float().double(),
}


def by_dlpack(made):
    torch.from_dlpack(made.factors[0].detach()).mul_(2)


def by_a_fused_step(made):
    made.factors[0].grad = torch.ones_like(made.factors[0])
    torch.optim.SGD([made.factors[0]], lr=0.1, fused=True).step()
    made.zero_grad()


def by_memory_of_another(made):
    """Kept values must not be views of what the weight no longer is."""
    old = made.factors[0].data
    made.factors[0].data = old.clone()
    made(inputs(made, 3))
    old.zero_()
    made.factors[0].data.mul_(2)


UNCOUNTED = {  # by torch
    "data in place": lambda made: made.factors[0].data.mul_(2),
    "numpy": lambda made: made.factors[0].detach().numpy().fill(2.0),
    "storage": lambda made: made.factors[0].untyped_storage().fill_(0),
    "dlpack": by_dlpack,
    "fused step": by_a_fused_step,
    "memory of another": by_memory_of_another,
}
CHANGES = COUNTED | UNCOUNTED


@pytest.mark.few(by="change")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("algo", sorted(ALGOS, key=lambda algo: algo not in DERIVING))
@pytest.mark.parametrize("trains", (False, True))  # nothing is stored of those that train
def test_a_changed_weight_shows(algo, change, trains):
    made = layer(CHAIN, algo).requires_grad_(trains)
    x = inputs(made, 3)
    with torch.no_grad():
        before = made(x)
        CHANGES[change](made)
        found = made(x)
    torch.testing.assert_close(found, expected(made, x))
    assert change == "dtype and back" or not torch.allclose(found, before)


@pytest.mark.parametrize("change", COUNTED)
@pytest.mark.parametrize("algo", DERIVING)
def test_a_counted_write_shows_under_the_promise_too(algo, change):
    made = layer(CHAIN, algo).requires_grad_(False).freeze()
    x = inputs(made, 3)
    with torch.no_grad():
        made(x)
        COUNTED[change](made)
        torch.testing.assert_close(made(x), expected(made, x))


def train(made):
    """A step that torch does not count, after which nothing is left of it."""
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    made(inputs(made, 3)).square().sum().backward()
    torch.optim.SGD(made.parameters(), lr=0.1, fused=True).step()
    made.zero_grad()
    for parameter in made.parameters():
        parameter.requires_grad_(False)


def replay(made):
    """What the replay of a graph that trains leaves: its gradients, and steps nobody counts."""
    by_a_fused_step(made)
    made.factors[0].grad = torch.ones_like(made.factors[0])


def train_compiled(made):
    made.train()
    by_a_fused_step(made)
    made.eval()


def train_by_hand(made):
    made.requires_grad_(True)
    by_a_fused_step(made)
    made.requires_grad_(False)


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("phase", [train, replay, train_compiled, train_by_hand])
@pytest.mark.parametrize("algo", DERIVING)
def test_training_between_two_frozen_calls_shows(algo, phase, promised):
    made = layer(CHAIN, algo).requires_grad_(False)
    made = made.freeze() if promised else made
    x = inputs(made, 3)
    before = made(x)
    phase(made)
    torch.testing.assert_close(made(x), expected(made, x))
    assert not torch.allclose(made(x), before)


@pytest.mark.parametrize("promised", [False, True])
@each_algo
def test_another_place_in_the_same_memory_shows(algo, promised):
    made = layer(CHAIN, algo).requires_grad_(False)
    made = made.freeze() if promised else made
    x = inputs(made, 3)
    both = random(2, *CHAIN[0])
    with torch.no_grad():
        for weight in both:
            made.factors[0].data = weight
            torch.testing.assert_close(made(x), expected(made, x))


@pytest.mark.parametrize("fused", (False, True))  # which counts no version
@each_algo
def test_an_optimizer_step_shows(algo, fused):
    made = layer(CHAIN, algo)
    x = inputs(made, 3)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        made(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(made(x), expected(made, x))


@pytest.mark.parametrize("algo", DERIVING)
def test_nothing_is_kept_of_weights_that_train(algo, monkeypatch):
    made, stored = layer(CHAIN, algo), noted_storage(monkeypatch)
    made.freeze()
    made(inputs(made, 3)).sum().backward()
    with torch.no_grad():
        made(inputs(made, 3))
    assert stored == [None] * 2 * len(CHAIN)


@pytest.mark.parametrize("algo", DERIVING)
def test_what_inference_mode_keeps_serves_gradients_of_the_input(algo):
    made = layer(CHAIN, algo).requires_grad_(False).freeze()
    x = inputs(made, 3, requires_grad=True)
    with torch.inference_mode():
        made(x)
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, product(made).sum(0).expand_as(x))


@pytest.mark.parametrize("algo", DERIVING)
def test_tensors_of_inference_mode_count_no_versions(algo):
    with torch.inference_mode():
        made = layer(CHAIN, algo).freeze()
        x = inputs(made, 3)
        made(x)
        made.factors[0].mul_(2)
        torch.testing.assert_close(made(x), expected(made, x))


@each_algo
def test_inputs_of_inference_mode_train_it(algo):
    made = layer([(2, 3, 4, 1)], algo)
    with torch.inference_mode():
        x = inputs(made, 3)
    made(x).sum().backward()
    torch.testing.assert_close(made.bias.grad, torch.full_like(made.bias, 3.0))


def test_another_algorithm_lets_go_of_what_was_kept(monkeypatch):
    made, stored = layer(CHAIN, "dense").requires_grad_(False), noted_storage(monkeypatch)
    with torch.no_grad():
        made(inputs(made, 3))
    kept = [weakref.ref(t) for t in stored]
    stored.clear()
    gc.collect()
    assert len(kept) == len(CHAIN) and all(ref() is not None for ref in kept)
    made.algo = "bmm"
    gc.collect()
    assert all(ref() is None for ref in kept)


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
