"""What is said where layers are swapped, or not, in a way that is seldom meant."""

import warnings

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib.nn import (
    KroneckerLinear,
    KSLinear,
    SparseLinear,
    block_sparsify,
    replace_linear,
    sparsify,
)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


NOTHING = {
    "sparsify": (lambda m: sparsify(m, "mlp", density=0.5), "sparsify swaps nothing: filter='mlp' "
                 r"takes none of the 2 nn.Linear of Sequential \('0', '2'\)"),
    "block_sparsify": (lambda m: block_sparsify(m, 16, 0.5, filter="mlp"),
                       "block_sparsify swaps nothing: filter='mlp' takes none of the 2"),
    "replace_linear, match": (lambda m: replace_linear(m, {(64, 64): [(4, 16, 16, 1)]},
                              match="mlp"), "replace_linear swaps nothing: match='mlp' takes none"),
    "replace_linear, sizes": (lambda m: replace_linear(m, {(3, 3): [(1, 3, 3, 1)]}),
                              r"no chain .* They are \[\(64, 64\)\], and patterns has \[\(3, 3\)"),
    "replace_linear, function": (lambda m: replace_linear(m, lambda *layer: None),
                                 r"no chain .* They are \[\(64, 64\)\];"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING)
def test_what_swaps_nothing_warns(case):
    swap, message = NOTHING[case]
    with pytest.warns(kl.KernlibWarning, match=message) as found:
        assert swap(model()) == {}
    assert len(found) == 1 and found[0].filename == __file__
    assert "category=kernlib.KernlibWarning) hides this" in str(found[0].message)


def test_a_model_without_layers_warns_of_that():
    with pytest.warns(kl.KernlibWarning, match="ReLU has no nn.Linear in it;"):
        sparsify(nn.ReLU(), density=0.5)
    derived = nn.Sequential(type("Mine", (nn.Linear,), {})(8, 8))
    with pytest.warns(kl.KernlibWarning, match="in it, only what derives from it: Mine;"):
        sparsify(derived, density=0.5)


def test_weights_that_nobody_has_pruned_warn():
    with pytest.warns(kl.KernlibWarning, match=r"leaves 2 of 2 layers dense \('0', '2'\)") as found:
        assert len(sparsify(model())) == 2
    assert len(found) == 1 and "density=0.5 prunes them" in str(found[0].message)


def test_what_is_meant_warns_of_nothing():
    pruned = model()
    for layer in (pruned[0], pruned[2]):
        layer.weight.data = kl.sparse.magnitude(layer.weight.data, 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kl.KernlibWarning)
        sparsify(pruned)
        sparsify(model(), density=0.5)
        sparsify(model(), density=1.0)
        sparsify(model(), format="dense")
        block_sparsify(model(), 16, 0.5)
        replace_linear(model(), {(64, 64): [(4, 16, 16, 1)]})


def test_the_state_of_a_linear_is_told_where_it_goes():
    linear = nn.Linear(64, 64)
    layer = SparseLinear.from_linear(linear, density=0.5)
    with pytest.raises(
        RuntimeError, match=r'"weight \(of an nn.Linear.*SparseLinear.from_linear\)"'
    ):
        layer.load_state_dict(linear.state_dict())
    whole = nn.Sequential(linear, nn.ReLU())
    state = whole.state_dict()
    sparsify(whole, density=0.5)
    with pytest.raises(RuntimeError, match=r'"0.weight \(of an nn.Linear, not'):
        whole.load_state_dict(state)
    assert whole.load_state_dict(state, strict=False).unexpected_keys == ["0.weight"]
    whole.load_state_dict(whole.state_dict())


@pytest.mark.parametrize(
    ("activation", "error", "message"),
    [
        ("Relu", ValueError, "got 'Relu'; did you mean relu?"),
        ("swish", ValueError, "got 'swish'; did you mean silu?"),
        (nn.ReLU(), TypeError, r"got ReLU\(\): write kernlib.Relu\(\)$"),
        (torch.relu, TypeError, r"got the function relu: write kernlib.Relu\(\)$"),
        (kl.Gelu, TypeError, r"got the class Gelu: call it, kernlib.Gelu\(\)$"),
    ],
)
def test_what_is_no_activation_is_told_what_to_write(activation, error, message):
    for make in (
        lambda: KSLinear([(6, 4, 4, 1)], activation=activation),
        lambda: KroneckerLinear([3], [2], activation=activation),
    ):
        with pytest.raises(error, match=message):
            make()
