"""Fused layers are saved, loaded, moved and copied as those that are not."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from kernlib.nn import sparsify
from tests.nn.fused.models import LlamaAttention, close, inputs, sparsified


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
