"""BlockSparseLinear as a module: values, gradients, saving, moving, and blocks that change."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import kernlib as kl
from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.layout import Layout
from kernlib.nn.block_sparse.linear import BlockSparseLinear
from tests.nn.layer_writes import former_state
from tests.support.dynamo_messages import said

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def layer(dtype=DOUBLE, **options) -> BlockSparseLinear:
    return BlockSparseLinear(96, 64, (16, 32), dtype=dtype, density=0.5, **options)


def inputs(*batch: int, dtype=DOUBLE) -> torch.Tensor:
    return torch.randn(*batch, 96, dtype=dtype)


def test_names_and_order_of_arguments():
    assert list(inspect.signature(BlockSparseLinear).parameters) == [
        "in_features", "out_features", "layout", "bias", "device", "dtype", "activation",
        "density", "capacity", "precision",
    ]  # fmt: skip
    assert list(inspect.signature(BlockSparseLinear.from_linear).parameters) == [
        "linear", "block", "density", "criterion", "per", "activation", "capacity", "precision",
    ]  # fmt: skip


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("batch", ((), (1,), (7,), (2, 3), (0,), (2, 0), (2, 3, 4)), ids=str)
def test_values_and_gradients_are_those_of_the_dense_matrix(batch, bias):
    made, x = layer(bias=bias), inputs(*batch).requires_grad_()
    dense = made.to_linear()
    assert dense.weight.count_nonzero() == 6 * 16 * 32 == made.layout.nnz * 16 * 32
    y = made(x)
    other = x.detach().clone().requires_grad_()
    wanted = dense(other)
    assert y.shape == wanted.shape and torch.allclose(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(x.grad, other.grad)
    assert torch.allclose(made.weight.grad, made.layout.to_blocks(dense.weight.grad))
    if bias:
        assert torch.allclose(made.bias.grad, dense.bias.grad)


ACTIVATIONS = {
    "gelu": F.gelu,
    kl.Gelu("tanh"): lambda v: F.gelu(v, approximate="tanh"),
    (kl.Relu(), kl.Tanh()): lambda v: torch.tanh(F.relu(v)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    made, x = layer(activation=activation), inputs(5)
    assert torch.allclose(made(x), ACTIVATIONS[activation](made.to_linear()(x)))
    assert f"activation={made.activation[0]}" in repr(made)


def test_a_layout_that_is_given_is_copied():
    layout = builders.random(64, 96, 32, 0.5)
    made = BlockSparseLinear(96, 64, layout)
    before = made.to_dense()
    layout.update_(~layout.mask())
    assert torch.equal(made.to_dense(), before) and made.layout is not layout
    assert (made.in_features, made.out_features, made.block) == (96, 64, (32, 32))


@pytest.mark.parametrize("density", (0.1, 0.5, 1.0))
def test_a_new_weight_gives_outputs_the_variance_of_a_dense_one(density):
    layout = builders.top_k(torch.rand(16, 32), 16, max(1, round(32 * density)))
    made = BlockSparseLinear(512, 256, layout, bias=False)
    stored = 16 * max(1, round(32 * density))
    live = made.weight.detach()
    assert live.abs().max() <= 1 / math.sqrt(stored)
    assert abs(live.std() * math.sqrt(3 * stored) - 1) < 0.05
    y = made(torch.randn(400, 512))
    assert abs(y.var() * 3 - 1) < 0.1


def test_rows_are_drawn_by_what_they_store_and_dead_slots_are_zero():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    made = BlockSparseLinear(64, 48, Layout(mask, 16, capacity=7))
    weight = made.weight.detach()
    assert weight[:4].abs().max() <= 1 / 8 < weight[4].abs().max() <= 1 / 4
    assert not weight[5:].any() and not made.to_dense()[32:].any()
    assert made.bias.abs().max() <= 1 / 8


def test_linear_layers_keep_their_largest_blocks():
    dense = nn.Linear(96, 64, dtype=DOUBLE).eval()
    dense.bias.requires_grad_(False)
    made = BlockSparseLinear.from_linear(dense, 32, density=0.5, capacity=5)
    norms = dense.weight.unflatten(1, (3, 32)).unflatten(0, (2, 32)).square().sum((1, 3))
    kept = made.layout.mask()
    assert kept.sum() == 3 and made.layout.capacity == 5 and norms[kept].min() > norms[~kept].max()
    blocks = kept.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(made.to_dense(), dense.weight * blocks)
    assert torch.equal(made.bias, dense.bias) and made.bias is not dense.bias
    assert not made.bias.requires_grad and made.weight.requires_grad and not made.training
    x = inputs(4)
    again = made.to_linear()
    assert torch.allclose(again(x), made(x)) and not again.training
    rows = BlockSparseLinear.from_linear(dense, 16, density=1 / 3, per="row").layout.mask().sum(1)
    assert rows.tolist() == [2] * 4
    drawn = BlockSparseLinear.from_linear(dense, 16, density=0.25, criterion="random").layout
    assert drawn.nnz == 6


WRONG = {
    "layout": (lambda: BlockSparseLinear(64, 64, "16"), TypeError, "block must be an int or two"),
    "mask": (lambda: BlockSparseLinear(64, 64, torch.ones(4, 4)), TypeError, "got a tensor"),
    "block": (lambda: BlockSparseLinear(64, 64, 8, density=1), ValueError, "block must have rows"),
    "density": (lambda: BlockSparseLinear(64, 64, 16), ValueError, "density must be given"),
    "rows": (
        lambda: BlockSparseLinear(64, 72, 16, density=1), ValueError,
        "out_features must be a multiple of 16, as blocks are 16 x 16, got 72",
    ),
    "columns": (
        lambda: BlockSparseLinear(100, 64, 16, density=1), ValueError, "in_features must be a mul",
    ),
    "sizes": (
        lambda: BlockSparseLinear(64, 32, builders.dense(64, 64, 16)), ValueError,
        r"layout must be of a matrix \(32, 64\), got \(64, 64\)",
    ),
    "heads": (
        lambda: BlockSparseLinear(64, 64, builders.dense(64, 64, 16, 2)), ValueError, "got 2 heads",
    ),
    "both": (
        lambda: BlockSparseLinear(64, 64, builders.dense(64, 64, 16), density=1), ValueError,
        "density and capacity go with a block",
    ),
    "criterion": (
        lambda: BlockSparseLinear.from_linear(nn.Linear(16, 16), 16, criterion="taylor"),
        ValueError, "criterion must be one of magnitude, random, got 'taylor'",
    ),
    "shape": (lambda: layer()(inputs(2)[:, :-1]), ValueError, r"\(..., 96\), got \(2, 95\)"),
    "scalar": (lambda: layer()(torch.ones((), dtype=DOUBLE)), ValueError, r"\(..., 96\), got \(\)"),
    "input's dtype": (
        lambda: layer()(inputs(2).float()), TypeError,
        "input must be torch.float64 as the layer's weight is, got torch.float32",
    ),
    "input's device": (lambda: layer()(inputs(2).to("meta")), ValueError, "input must be on cpu"),
    "no count": (lambda: layer().drop_(), ValueError, "give count or density"),
    "two counts": (lambda: layer().drop_(1, 0.5), ValueError, "give count or density"),
    "a negative count": (lambda: layer().drop_(-1), ValueError, "count must be 0 to"),
    "nothing watched": (lambda: layer().regrow_(1), RuntimeError, "call watch_growth"),
    "candidates": (
        lambda: layer().watch_growth(True, builders.dense(64, 96, 16)), ValueError,
        r"candidates must have blocks \(16, 32\), got \(16, 16\)",
    ),
    "optimizer": (lambda: layer().drop_(1, optimizer=3), TypeError, "optimizer must be one of"),
    "remapped": (
        lambda: layer().remap(torch.ones(3)), ValueError, r"weight's shape \(6, 16, 32\), got \(3,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        make()


# Saving and moving.


def test_state_dicts_hold_the_layout_and_load_in_place():
    made, other, x = layer(), layer(), inputs(3)
    assert not torch.equal(made.layout.mask(), other.layout.mask())
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    held, tensors = other.layout, other.layout.tensors
    assert not any(other.load_state_dict(state))
    assert other.layout is held and all(
        a is b for a, b in zip(tensors, other.layout.tensors, strict=True)
    )
    assert torch.equal(other(x), made(x))
    empty = layer(device="meta")
    assert "density" not in repr(empty) and empty(inputs(2).to("meta")).shape == (2, 64)
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty(x), made(x))


STATES = {
    "mark": (lambda s: s["index_mark"].add_(1), "its index_mark says no blocks of a layer of"),
    "average": (lambda s: s["index_mark"].mul_(0.9), "was damaged or averaged"),
    "half a mark": (lambda s: s.update(index_mark=s["index_mark"][1:]), "its index_mark says no"),
    "ints": (lambda s: s.update(index_mark=s["index_mark"].int()), "its index_mark says no"),
    "no tensor": (lambda s: s.update(index_mark=3), "must be a tensor with values, got int"),
    "meta": (lambda s: s.update(layer(device="meta").state_dict()), "a tensor with values"),
    "blank": (
        lambda s: s.update(index_mark=torch.zeros_like(s["index_mark"])), "stored no blocks yet",
    ),
    "capacity": (
        lambda s: s.update(layer(capacity=9).state_dict()), r"shape \(9, 16, 32\), that of",
    ),
}  # fmt: skip
FORMER = {
    "tensor": (lambda s: s["layout_rows"].add_(1), "checksum"),
    "lacking": (lambda s: s.pop("layout_cols"), "has the tensors"),
    "header": (lambda s: s.update(_extra_state=torch.zeros(3)), "no header of a layout"),
    "two headers": (
        lambda s: s.update(_extra_state=s["_extra_state"].repeat(99)), "no header of a layout",
    ),
    "null": (
        lambda s: s.update(_extra_state=torch.tensor(list(b"null")).byte()), "without a layout",
    ),
}  # fmt: skip


@pytest.mark.few(100)
@pytest.mark.parametrize("case", [*STATES, *FORMER])
def test_states_are_looked_at(case):
    made, other = layer(), layer()
    change, words = (STATES | FORMER)[case]
    state = former_state(made) if case in FORMER else made.state_dict()
    state = {name: value.clone() for name, value in state.items()}
    change(state)
    before = other.to_dense()
    with pytest.raises(RuntimeError, match=words):
        other.load_state_dict(state)
    assert torch.equal(other.to_dense(), before)


def test_a_state_is_of_one_grid_and_has_a_mark():
    state = layer().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*index_mark"):
        layer().load_state_dict({k: t for k, t in state.items() if k != "index_mark"})
    wider = BlockSparseLinear(160, 64, (16, 32), density=0.3, dtype=DOUBLE)
    assert wider.weight.shape == layer().weight.shape
    assert wider.state_dict()["index_mark"].shape == state["index_mark"].shape
    with pytest.raises(RuntimeError, match=r"4x5 grid.*or saved of a layer of other sizes"):
        wider.load_state_dict(state)


def test_a_layout_without_a_weight_is_not_loaded():
    made, other = layer(), layer()
    before = made.to_dense()
    state = {name: t for name, t in other.state_dict().items() if name != "weight"}
    with pytest.raises(RuntimeError, match="it has a layout and no weight"):
        made.load_state_dict(state, strict=False)
    assert torch.equal(made.to_dense(), before)


def test_copies_and_pickles():
    made, x = layer(activation="relu").watch_growth(), inputs(3)
    made(x).sum().backward()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(x), made(x)) and other.layout is not made.layout
        assert torch.equal(other.growth_gradient, made.growth_gradient)
        other.drop_(6)
        assert made.layout.nnz == 6 and other.layout.nnz == 0


def test_moves_keep_the_contents():
    made, x = layer(), inputs(3)
    wanted = made(x)
    for move in (
        lambda m: m.float(), lambda m: m.type(torch.float32), lambda m: m.to("cpu", torch.bfloat16),
    ):  # fmt: skip
        other = move(copy.deepcopy(made))
        assert {t.dtype for t in other.layout.tensors} == {torch.int32}
        assert torch.allclose(other(x.to(other.weight.dtype)).double(), wanted, atol=0.05)
    other = copy.deepcopy(made).to_empty(device="cpu")
    assert torch.equal(other.layout.mask(), made.layout.mask())
    nothing = layer(device="meta").to_empty(device="cpu")
    assert nothing.layout.nnz == 0 and nothing.layout.capacity == 6
    assert copy.deepcopy(made).to("meta").layout.device.type == "meta"


def test_other_buffers_are_taken_for_a_call():
    made, other, x = layer(), layer(), inputs(3)
    state = {**dict(other.named_buffers()), **dict(other.named_parameters())}
    assert torch.equal(torch.func.functional_call(made, state, (x,)), other(x))
    base = copy.deepcopy(made).to("meta")
    assert torch.equal(torch.func.functional_call(base, state, (x,)), other(x))
    former = former_state(other).items()
    given = {k: t.clone() for k, t in former if k != "_extra_state"}
    assert torch.equal(torch.func.functional_call(made, given, (x,)), other(x))
    given["layout_rows"] = given["layout_rows"] + 1
    with pytest.raises(ValueError, match="rows is not that of a layout with these row_bits"):
        torch.func.functional_call(made, given, (x,))
    given["layout_rows"] = given["layout_rows"][:3]
    with pytest.raises(ValueError, match=r"layout_rows must be torch\.int32 of shape"):
        torch.func.functional_call(made, given, (x,))


def test_compiled_it_is_one_graph():
    made, x = layer(activation="silu"), inputs(3)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), made(x))
    made.drop_(2)
    assert torch.equal(compiled(x), made(x))


def test_autocast_casts_the_weight():
    made = layer(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(inputs(3, dtype=torch.float32))
    assert y.dtype == torch.bfloat16


# Blocks that change.


def test_updates_keep_what_stays():
    made = BlockSparseLinear(96, 64, 32, density=0.5, capacity=5, dtype=DOUBLE)
    before, mask = made.to_dense().detach(), made.layout.mask()
    made(inputs(3)).sum().backward()
    gradient = made.layout.to_dense(made.weight.grad)
    other = torch.tensor([[1, 1, 1], [0, 1, 1]])
    stays = (mask & other.bool()).repeat_interleave(32, 0).repeat_interleave(32, 1)
    weight, address = made.weight, made.weight.data_ptr()
    assert made.update_(other) is made
    assert made.weight is weight and weight.data_ptr() == address
    assert torch.equal(made.to_dense(), before * stays)
    assert torch.equal(made.layout.to_dense(weight.grad), gradient * stays)
    with pytest.raises(ValueError, match="capacity"):
        made.update_(torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(made.to_dense(), before * stays)


def test_the_smallest_blocks_are_dropped():
    made = BlockSparseLinear(64, 64, 16, density=0.75)
    with torch.no_grad():
        made.weight.mul_(torch.arange(1.0, 13.0)[torch.randperm(12), None, None])
    before, norms = made.weight.detach().clone(), made.weight.detach().square().sum((1, 2))
    made.drop_(5)
    assert made.layout.nnz == 7 and made.layout.capacity == 12
    kept = norms >= norms.sort(descending=True).values[6]
    assert torch.equal(made.weight[:7], before[kept]) and not made.weight[7:].any()
    assert torch.equal(made.remap(norms[:, None, None] * torch.ones(16, 16))[:7, 0, 0], norms[kept])
    assert made.drop_(density=0.25).layout.nnz == 4 == made.drop_(density=0.5).layout.nnz
    assert made.drop_(100).layout.nnz == 0 and not made(torch.ones(64)).ne(made.bias).any()


@pytest.mark.parametrize("activation", (None, "gelu"))
def test_blocks_of_largest_gradient_are_grown(activation):
    made, xs = layer(activation=activation), [inputs(5), inputs(2, 3)]
    made.drop_(3).watch_growth()
    assert made.growth_candidates.nnz == 12 and made.growth_gradient is None
    dense = made.to_linear()
    for x in xs:
        assert torch.equal(made(x), made.eval()(x))
        made.train()(x).square().sum().backward()
        y = dense(x)
        (F.gelu(y) if activation else y).square().sum().backward()
    gradient = made.growth_candidates.to_dense(made.growth_gradient)
    assert torch.allclose(gradient, dense.weight.grad)
    norms = gradient.unflatten(1, (3, 32)).unflatten(0, (4, 16)).square().sum((1, 3))
    before, mask = made.to_dense().detach(), made.layout.mask()
    made.regrow_(2)
    grown = made.layout.mask() & ~mask
    assert grown.sum() == 2 and (made.layout.mask() & mask).sum() == 3
    assert norms[grown].min() > norms[~grown & ~mask].max()
    assert torch.equal(made.to_dense(), before) and made.growth_gradient is None
    made(xs[0]).sum().backward()
    assert made.regrow_().layout.nnz == 6 == made.layout.capacity
    with pytest.raises(RuntimeError, match="watch_growth"):
        made.watch_growth(False).regrow_(1)


def test_only_candidates_are_grown():
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[0] = True
    made = layer().drop_(6).watch_growth(True, Layout(mask, (16, 32)))
    made(inputs(4)).sum().backward()
    assert made.growth_gradient.shape == (3, 16, 32)
    assert torch.equal(made.regrow_(5).layout.mask(), mask)


def test_a_state_of_an_optimizer_follows():
    made = layer()
    optimizer = torch.optim.Adam(made.parameters(), 0.1)
    made.watch_growth()(inputs(4)).square().sum().backward()
    optimizer.step()
    moment = made.layout.to_dense(optimizer.state[made.weight]["exp_avg"])
    mask = made.drop_(2, optimizer=optimizer).layout.mask()
    made.regrow_(2, optimizer)
    assert mask.sum() == 4 and made.layout.nnz == 6
    stays = mask.repeat_interleave(16, 0).repeat_interleave(32, 1)
    found = made.layout.to_dense(optimizer.state[made.weight]["exp_avg"])
    assert torch.equal(found, moment * stays)
    assert optimizer.state[made.weight]["exp_avg"].shape == made.weight.shape
    made(inputs(4)).sum().backward()
    optimizer.step()


def test_what_an_optimizer_keeps_of_rows_and_columns_follows():
    made = BlockSparseLinear(32, 32, Layout([[1, 0], [1, 1]], 16))
    optimizer = torch.optim.Adafactor(made.parameters())
    made(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    state = optimizer.state[made.weight]
    before = {name: state[name].clone() for name in ("row_var", "col_var")}
    made.update_([[0, 1], [1, 1]], optimizer)
    for name, held in before.items():
        assert torch.equal(state[name][1:], held[1:]) and not state[name][0].any()


def test_a_change_that_would_not_last_is_refused():
    made = layer()
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        with pytest.raises(RuntimeError, match="that of a BlockSparseLinear, whose values would"):
            one.layout.update_(one.layout.mask())
        with pytest.raises(RuntimeError, match="call the update_ of that"):
            one.layout.update_indices_([0], [0])
    copy.deepcopy(made.layout).update_(made.layout.mask())
    with pytest.raises(ValueError, match="optimizer must be one that has the layer's weight"):
        made.drop_(1, optimizer=torch.optim.Adam([made.bias]))
    assert made.layout.nnz == 6
    computed = nn.utils.parametrizations.weight_norm(layer())
    pruned = prune.l1_unstructured(layer(), "weight", 0.5)
    for one in (computed, pruned):
        before = one.to_dense()
        with pytest.raises(RuntimeError, match="weight is computed of other tensors"):
            one.drop_(1)
        assert torch.equal(one.to_dense(), before)


def test_watching_is_refused_inside_of_transforms():
    made, x = layer().watch_growth(), inputs(2)
    with pytest.raises(RuntimeError, match=r"none inside a transform of torch\.func"):
        torch.func.grad(lambda w: torch.func.functional_call(made, {"weight": w}, x).sum())(
            made.weight.detach()
        )


def test_watching_is_refused_when_compiled():
    torch._dynamo.reset()
    made = layer().watch_growth()
    with pytest.raises(Exception, match=said("watch_growth")):
        torch.compile(made, fullgraph=True, backend="eager")(inputs(2))
