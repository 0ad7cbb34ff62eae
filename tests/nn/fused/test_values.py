"""Layers that read one x as one product: who computes it, what the others take of it, and when they
must not."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernlib.nn import SparseLinear
from tests.families.sparse.cases import FORMATS
from tests.nn.fused.models import (
    QKV,
    LlamaAttention,
    close,
    inputs,
    pair,
    sparsified,
    write,
    write_a_view,
)

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


def move(x):
    x.data = x.data.flip(0).contiguous()


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


def test_a_bias_that_comes_later_is_added(products):
    fused, apart = pair(lambda bias: LlamaAttention(bias))
    x, bias = inputs(3), nn.Parameter(torch.randn(32))
    with torch.no_grad():
        fused.k_proj.bias = apart.k_proj.bias = bias
        close(fused(x), apart(x))
        run = torch.compile(fused, fullgraph=True, backend="eager")
        close(run(x), apart(x))
        fused.k_proj.bias = apart.k_proj.bias = None
        close(fused(x), apart(x))
        close(run(x), apart(x))
        fused.q_proj.bias, fused.k_proj.bias = bias, nn.Parameter(torch.zeros(64))
        with pytest.raises(ValueError, match=r"bias must have shape \(64,\), got \(32,\)"):
            fused.v_proj(x)


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
