"""Layers that read one x as one product: who computes it, what the others take of it, and when they
must not; how they are saved, loaded, moved and compiled."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import kernlib as kl
from kernlib.nn import SparseLinear, sparse_linear, sparsify
from tests.families.sparse.cases import FORMATS

QKV = ["q_proj", "k_proj", "v_proj"]
DENSITY = 0.4


class LlamaAttention(nn.Module):
    """As transformers has it, without positions: k and v have fewer heads than q."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(64, 64, bias), nn.Linear(64, 64, bias)
        self.k_proj, self.v_proj = nn.Linear(64, 32, bias), nn.Linear(64, 32, bias)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, 16)
        q = self.q_proj(x).view(shape).transpose(-2, -3)
        k = self.k_proj(x).view(shape).transpose(-2, -3).repeat_interleave(2, -3)
        v = self.v_proj(x).view(shape).transpose(-2, -3).repeat_interleave(2, -3)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3)
        return self.o_proj(y.reshape(*x.shape[:-1], -1))


class LlamaMLP(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias)
        self.down_proj = nn.Linear(96, 64, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(bias), LlamaMLP(bias)

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(x)


def block(bias: bool = False, dtype=torch.float32) -> Block:
    torch.manual_seed(0)
    return Block(bias).to(dtype)


def pair(kind=block, bias: bool = False, **options) -> tuple[nn.Module, nn.Module]:
    """A model of fused layers, and one of the same weights that are not."""
    fused, apart = kind(bias), kind(bias)
    apart.load_state_dict(fused.state_dict())
    sparsify(fused, density=DENSITY, fuse=True, **options)
    sparsify(apart, density=DENSITY, **options)
    return fused, apart


def inputs(*batch: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*batch, 64, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def products(monkeypatch) -> list[tuple[int, int]]:
    """The shapes of the matrices that layers multiply by."""
    shapes, run = [], sparse_linear.run_kernel

    def counting(descriptor, matrix, *rest, **named):
        shapes.append(matrix.shape)
        return run(descriptor, matrix, *rest, **named)

    monkeypatch.setattr(sparse_linear, "run_kernel", counting)
    return shapes


def compiled(module, **options):
    """A module compiled as one graph, and the list of how many products each graph has."""
    torch._dynamo.reset()
    counts: list[int] = []

    def count(graph, _):
        counts.append(sum("sparse_matmul" in str(node.target) for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=count)
    return torch.compile(module, fullgraph=True, backend=backend, **options), counts


# What they compute.


@pytest.mark.parametrize("bias", (False, True))
def test_a_block_computes_four_products_in_place_of_seven(bias, products):
    fused, apart = pair(bias=bias)
    for batch in ((1,), (1, 1), (2, 3)):
        x = inputs(*batch)
        products.clear()
        with torch.no_grad():
            y = fused(x)
            assert products == [(128, 64), (64, 64), (192, 64), (64, 96)]
            close(y, apart(x))


@pytest.mark.parametrize("format", FORMATS)
def test_each_layer_has_its_rows_in_every_format(format):
    fused, apart = pair(lambda bias: LlamaAttention(bias), format=format)
    for name in QKV:
        ours, plain = fused.get_submodule(name), apart.get_submodule(name)
        assert isinstance(ours, SparseLinear)
        assert ours.joint.matrix.format == ours.matrix.format == format
        assert torch.equal(ours.to_dense(), plain.to_dense())
        assert torch.equal(ours.weight, plain.weight) and ours.matrix.nnz == plain.matrix.nnz
        assert torch.equal(ours.to_linear().weight, plain.to_dense())
        close(ours(inputs(3)), plain(inputs(3)))


def test_a_group_holds_one_matrix():
    fused, _ = pair(lambda bias: LlamaAttention(bias))
    layers = [fused.get_submodule(name) for name in QKV]
    assert len({layer.joint for layer in layers}) == 1
    total = layers[0].joint.nbytes
    assert total - 3 < sum(layer.nbytes for layer in layers) <= total
    assert "first_row=64" in repr(layers[1])


@pytest.mark.parametrize("bias", (False, True))
def test_gradients_are_those_of_layers_apart(bias, products):
    results = []
    for model in pair(bias=bias):
        x = inputs(2, 5).requires_grad_()
        model(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for ours, plain in zip(*results, strict=True):
        close(ours, plain)


# When rows of another call may be taken.


def attention(products) -> tuple[nn.Module, nn.Module]:
    fused, apart = pair(lambda bias: LlamaAttention(bias), bias=True)
    products.clear()
    return fused, apart


def test_layers_may_be_called_in_any_order_and_with_different_x(products):
    fused, apart = attention(products)
    x, other = inputs(3), inputs(3, seed=2)
    with torch.no_grad():
        for name, given in (("k_proj", x), ("v_proj", x), ("q_proj", x)):
            close(fused.get_submodule(name)(given), apart.get_submodule(name)(given))
        assert products.count((128, 64)) == 1
        for name, given in (("q_proj", x), ("k_proj", other), ("v_proj", other), ("q_proj", x)):
            close(fused.get_submodule(name)(given), apart.get_submodule(name)(given))
        assert products.count((128, 64)) == 4
        for _ in range(2):  # the same layer again computes again
            close(fused.q_proj(x), apart.q_proj(x))
        assert products.count((128, 64)) == 6


def write(x):
    x.add_(1)


def write_a_view(x):
    x[0].mul_(2)


def move(x):
    x.data = x.data.flip(0).contiguous()


def no_change(x):
    pass


@pytest.mark.parametrize("change", (write, write_a_view, move))
@pytest.mark.parametrize("inference", (False, True))
def test_rows_of_an_x_that_was_written_are_not_taken(change, inference, products):
    fused, apart = attention(products)
    with torch.inference_mode() if inference else torch.no_grad():
        x = inputs(3).clone()
        close(fused.q_proj(x), apart.q_proj(x))
        change(x)
        for name in ("k_proj", "v_proj"):
            close(fused.get_submodule(name)(x), apart.get_submodule(name)(x))


def test_rows_of_a_bias_or_weight_that_was_written_are_not_taken(products):
    fused, apart = attention(products)
    x = inputs(3)
    with torch.no_grad():
        fused.q_proj(x)
        for model in (fused, apart):
            model.k_proj.bias.add_(1)
        close(fused.k_proj(x), apart.k_proj(x))
        for model in (fused, apart):
            model.v_proj.bias = nn.Parameter(torch.ones(32))
        close(fused.v_proj(x), apart.v_proj(x))
        fused.q_proj(x)
        state = sparsified(seed=5).state_dict()
        for model in (fused, apart):
            model.load_state_dict(state)
        close(fused.k_proj(x), apart.k_proj(x))


def sparsified(seed: int, fuse: bool = False, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    model = LlamaAttention(bias)
    sparsify(model, density=DENSITY, fuse=fuse)
    return model


def test_rows_are_taken_in_the_same_grad_mode_alone(products):
    fused, apart = attention(products)
    x = inputs(3)
    with torch.no_grad():
        fused.q_proj(x)
    assert fused.k_proj(x).requires_grad  # as the bias does
    fused.q_proj(x)
    with torch.no_grad():
        assert not fused.k_proj(x).requires_grad
    for p in (*fused.parameters(), *apart.parameters()):
        p.requires_grad_(False)
    fused.q_proj(x)
    x.requires_grad_()  # of the same x, written by nobody
    ours, plain = (torch.autograd.grad(m.k_proj(x).sum(), x)[0] for m in (fused, apart))
    close(ours, plain)


def test_an_interrupted_call_leaves_nothing_that_a_new_x_could_meet(products):
    fused, apart = attention(products)
    with torch.no_grad():
        for seed in range(20):
            x = inputs(3, seed=seed)  # which may lie where the one before lay
            close(fused.k_proj(x), apart.k_proj(x))
            del x


def test_threads_do_not_take_what_another_computed(products):
    fused, apart = attention(products)
    x, failures = inputs(3), []
    expected = [apart.get_submodule(name)(x).detach() for name in QKV]
    others = inputs(3, seed=2)
    wrong = [apart.get_submodule(name)(others).detach() for name in QKV]

    def run(given, results):
        try:
            with torch.no_grad():
                for _ in range(30):
                    for name, result in zip(QKV, results, strict=True):
                        close(fused.get_submodule(name)(given), result)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=a) for a in ((x, expected), (others, wrong)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_compute_what_they_recompute(reentrant):
    results = []
    for model in pair(bias=True):
        x = inputs(4).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for ours, plain in zip(*results, strict=True):
        close(ours, plain)


def test_transforms_and_traces_see_each_product():
    fused, apart = pair(bias=True)
    x = inputs(4)
    for transform in (
        lambda model: torch.func.vmap(model, randomness="error")(x[None].expand(3, -1, -1)),
        lambda model: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
        lambda model: torch.func.jacrev(lambda v: model(v).sum(0))(x),
        lambda model: torch.jit.trace(model, x, check_trace=False)(inputs(4, seed=3)),
    ):
        close(transform(fused), transform(apart))


def test_hooks_of_layers_are_called_with_their_part(products):
    fused, apart = attention(products)
    for model in (fused, apart):
        model.k_proj.register_forward_pre_hook(lambda layer, given: (given[0] * 2,))
        model.v_proj.register_forward_hook(lambda layer, given, y: y + 1)
    with torch.inference_mode():
        close(fused(inputs(3)), apart(inputs(3)))


def test_a_half_input_and_autocast():
    fused, apart = pair(bias=True)
    x = inputs(3).half()
    y = fused.self_attn.k_proj(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, apart.self_attn.k_proj(x), rtol=2e-3, atol=2e-3)
    for model in (fused, apart):
        model.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, plain = fused(inputs(3)), apart(inputs(3))
    torch.testing.assert_close(y, plain, rtol=0.02, atol=0.02)


# Compiled.


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


# Saving, loading and moving.


def packed(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


@pytest.mark.parametrize("assign", (False, True))
def test_states_are_those_of_layers_apart_and_load_both_ways(assign, products):
    x = inputs(3)
    for source in (False, True):
        for target in (False, True):
            model, into = sparsified(3, fuse=source), sparsified(4, fuse=target)
            state = torch.load(io.BytesIO(packed(model)), weights_only=True)
            assert list(state) == list(into.state_dict())
            assert not any(into.load_state_dict(state, assign=assign))
            products.clear()
            with torch.no_grad():
                assert torch.equal(into.k_proj.to_dense(), model.k_proj.to_dense())
                close(into(x), model(x))
            assert products[:1] == [(128 if target else 64, 64)]


def test_a_part_of_a_state_loads_its_rows(products):
    fused, other = sparsified(3, fuse=True), sparsified(4)
    rows = {k: v for k, v in other.state_dict().items() if k.startswith("k_proj")}
    before = fused.q_proj.to_dense()
    fused.load_state_dict(rows, strict=False)
    assert torch.equal(fused.k_proj.to_dense(), other.k_proj.to_dense())
    products.clear()
    with torch.no_grad():
        for seed in (1, 2):
            close(fused.k_proj(inputs(2, seed=seed)), other.k_proj(inputs(2, seed=seed)))
    assert set(products[::2]) == {(128, 64)} and torch.equal(fused.q_proj.to_dense(), before)
    fused.k_proj.load_state_dict(sparsified(5).k_proj.state_dict())
    again = sparsified(6)
    again.load_state_dict(fused.state_dict())
    assert torch.equal(again.k_proj.to_dense(), sparsified(5).k_proj.to_dense())
    assert torch.equal(again.q_proj.to_dense(), before)


def test_missing_and_dense_weights_are_named():
    fused = sparsified(3, fuse=True)
    with pytest.raises(RuntimeError, match=r"q_proj.weight_packed(.|\n)*of an nn.Linear, not comp"):
        fused.load_state_dict(LlamaAttention(True).state_dict())
    state = fused.state_dict()
    state["k_proj.weight_packed"] = state["q_proj.weight_packed"]
    with pytest.raises(RuntimeError, match=r"matrix loaded has shape \(64, 64\)"):
        fused.load_state_dict(state)


@pytest.mark.parametrize("way", ("assign", "attribute"))
def test_a_model_on_meta_is_filled(way, products):
    wanted = sparsified(3)
    with torch.device("meta"):
        model = LlamaAttention(True)
    sparsify(model, fuse=True)
    if way == "assign":
        model.load_state_dict(wanted.state_dict(), assign=True)
    else:
        for key, tensor in wanted.state_dict().items():
            prefix, name = key.rsplit(".", 1)
            tensor = nn.Parameter(tensor) if name == "bias" else tensor
            setattr(model.get_submodule(prefix), name, tensor)
    products.clear()
    with torch.no_grad():
        close(model(inputs(3)), wanted(inputs(3)))
    assert products[0] == (128, 64)


def test_copies_and_pickles_are_groups_of_their_own(products):
    fused = sparsified(3, fuse=True)
    x = inputs(3)
    with torch.no_grad():
        fused.q_proj(x)  # whose rows are kept for the others
        expected = fused.k_proj(x)
        for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
            other = make(fused)
            assert other.k_proj.joint is other.q_proj.joint is not fused.q_proj.joint
            products.clear()
            close(other(x), fused(x))
            assert products.count((128, 64)) == 2
            other.load_state_dict(sparsified(4).state_dict())
            close(fused.k_proj(x), expected)
            alone = make(fused.k_proj)
            close(alone(x), expected)


def test_another_dtype_place_and_empty_layers(products):
    fused, apart = sparsified(3, fuse=True), sparsified(3)
    state = apart.state_dict()
    for model in (fused, apart):
        model.half()
    assert fused.q_proj.joint.matrix.dtype == torch.float16
    assert torch.equal(fused.v_proj.to_dense(), apart.v_proj.to_dense())
    fused.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="empty"):
        fused.q_proj(inputs(2).half())
    assert fused.state_dict()["q_proj.weight_packed"].numel() == 0
    fused.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(fused.k_proj(inputs(2).half()), apart.k_proj(inputs(2).half()))
    assert fused.k_proj.joint.matrix.dtype == torch.float16
    assert fused.to("meta").q_proj.state_dict()["weight_packed"].is_meta
    fused.load_state_dict(state, assign=True)
    with torch.no_grad():
        close(fused(inputs(2)), sparsified(3)(inputs(2)))


def test_another_state_for_one_call():
    fused, other, x = sparsified(3, fuse=True), sparsified(4), inputs(3)
    with torch.no_grad():
        before = fused(x)
        state = {k: v for k, v in other.state_dict().items() if k.startswith("k_proj")}
        y = torch.func.functional_call(fused.k_proj, {k[7:]: v for k, v in state.items()}, (x,))
        close(y, other.k_proj(x))
        close(fused(x), before)


def test_a_frozen_group():
    fused = sparsified(3, fuse=True)
    assert fused.k_proj.freeze() is fused.k_proj
    assert fused.q_proj.joint.matrix.frozen
    close(fused(inputs(2)), sparsified(3)(inputs(2)))
    assert not fused.v_proj.thaw().joint.matrix.frozen


# Which layers are groups.


def test_groups_by_names(products):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 32)
            self.a, self.b = nn.Linear(64, 16), nn.Linear(64, 16)

        def forward(self, x):
            return [layer(x) for layer in (self.query, self.key, self.a, self.b)]

    torch.manual_seed(0)
    model = nn.Sequential(Mixed())
    plain = copy.deepcopy(model)
    sparsify(plain, density=DENSITY)
    new = sparsify(model, density=DENSITY, fuse=[["query", "key"], ["0.a", "0.b"]])
    assert list(new) == ["0.query", "0.key", "0.a", "0.b"] and new["0.key"] is model[0].key
    products.clear()
    with torch.no_grad():
        for ours, theirs in zip(model(inputs(3)), plain(inputs(3)), strict=True):
            close(ours, theirs)
    assert products[:2] == [(96, 64), (32, 64)]


@pytest.mark.parametrize(
    "fuse, error, words",
    [
        ([["q_proj", "key"]], ValueError, "fuse names 'key', and the model has no such layer.*q_p"),
        ([["q_proj", "gate_proj"]], ValueError, "no module has all of these layers"),
        ([["q_proj"]], ValueError, "two layers or more"),
        ([["q_proj", "q_proj"]], ValueError, "two layers or more"),
        ([["q_proj", "k_proj"], ["k_proj", "v_proj"]], ValueError, "'self_attn.k_proj' in two"),
        (["q_proj", "k_proj"], TypeError, "a group of fuse must be a list of names"),
        ("q_proj", TypeError, "fuse must be a bool or a list of groups"),
        (3, TypeError, "fuse must be a bool or a list of groups"),
        ([[1, 2]], TypeError, "a group of fuse must be a list of names"),
    ],
)
def test_groups_that_are_none_are_refused(fuse, error, words):
    model = block()
    with pytest.raises(error, match=words):
        sparsify(model, density=DENSITY, fuse=fuse)
    assert type(model.self_attn.q_proj) is nn.Linear


def with_hook(layers):
    layers.k_proj.register_forward_hook(lambda *_: None)


def with_bias(layers):
    layers.k_proj.bias = nn.Parameter(torch.zeros(32))


def of_other_dtype(layers):
    layers.k_proj.half()


def of_other_inputs(layers):
    layers.k_proj = nn.Linear(32, 32, bias=False)


def in_two_places(layers):
    layers.other = layers.k_proj


def an_adapter(layers):
    layers.k_proj = nn.Sequential(layers.k_proj)


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_hook, "a layer has hooks"), (with_bias, "some have a bias"),
        (of_other_dtype, "they differ in dtype: torch.float16, torch.float32"),
        (of_other_inputs, "they differ in inputs: 32, 64"),
        (in_two_places, "a layer stands in several places"),
        (an_adapter, "self_attn.k_proj is not swapped"),
    ],
)  # fmt: skip
def test_groups_that_stay_apart_are_warned_of(change, reason):
    model = block()
    change(model.self_attn)
    with pytest.warns(kl.KernlibWarning, match=rf"leaves 1 of 2 groups apart: self_attn.*{reason}"):
        new = sparsify(model, density=DENSITY, fuse=True)
    assert not hasattr(new["self_attn.q_proj"], "joint") and new["mlp.up_proj"].joint


def test_models_without_groups_are_warned_of():
    class Phi3Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv_proj = nn.Linear(64, 96)

    with pytest.warns(kl.KernlibWarning, match="fuses nothing.*'0.qkv_proj' is one product"):
        sparsify(nn.Sequential(Phi3Attention()), density=DENSITY, fuse=True)


def test_what_match_leaves_out_is_not_fused():
    model = block()
    with pytest.warns(kl.KernlibWarning, match="self_attn.q_proj is not swapped"):
        sparsify(model, match="mlp", density=DENSITY, fuse=True)
    assert type(model.self_attn.q_proj) is nn.Linear and model.mlp.up_proj.joint


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip

    class Swapped(transformers.LlamaForCausalLM):
        fuse: bool | list = True

        def __init__(self, config):
            super().__init__(config)
            sparsify(self, match="mlp|self_attn", density=0.4, fuse=self.fuse)

    class Apart(Swapped):
        fuse = False

    tokens, folder = torch.arange(10)[None], str(tmp_path / "model")
    for source, target in ((Swapped, Swapped), (Swapped, Apart), (Apart, Swapped)):
        wanted = source(config).eval()
        wanted.save_pretrained(folder)
        model, info = target.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())
        with torch.no_grad():
            close(model.eval()(tokens).logits, wanted(tokens).logits)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(tokens, **options), wanted.generate(tokens, **options))
