"""What is said where layers are swapped, or not, in a way that is seldom meant."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib.compat import torch_blocksparse
from kernlib.hints.calls import hinted
from kernlib.nn import (
    BlockSparseLinear,
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
    "sparsify": (lambda m: sparsify(m, match="mlp", density=0.5),
                 "sparsify swaps nothing: match='mlp' "
                 r"takes none of the 2 nn.Linear of Sequential \('0', '2'\)"),
    "block_sparsify": (lambda m: block_sparsify(m, 16, density=0.5, match="mlp"),
                       "block_sparsify swaps nothing: match='mlp' takes none of the 2"),
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
    with pytest.warns(kl.KernlibWarning, match=r"what is like it: tests.nn.test_words.Mine;"):
        sparsify(derived, density=0.5)


def test_weights_that_nobody_has_pruned_warn():
    with pytest.warns(kl.KernlibWarning, match=r"leaves 2 of 2 layers dense \('0', '2'\)") as found:
        assert len(sparsify(model())) == 2
    assert len(found) == 1 and "density=0.5 prunes them" in str(found[0].message)


def test_a_weight_that_nobody_has_pruned_warns():
    linear = nn.Linear(64, 64)
    with pytest.warns(kl.KernlibWarning, match="from_linear leaves the weight dense") as found:
        layer = SparseLinear.from_linear(linear)
    assert layer.matrix.format == "dense" and len(found) == 1 and found[0].filename == __file__
    told = str(found[0].message)
    assert "density=0.5 prunes it" in told and "category=kernlib.KernlibWarning) hides" in told


def test_layers_with_zeros_that_are_dense_for_speed_warn_of_nothing():
    """Sixteen vectors at a time are fastest with a dense weight, pruned or not."""
    pruned = model()
    for layer in (pruned[0], pruned[2]):
        layer.weight.data = kl.sparse.magnitude(layer.weight.data, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kl.KernlibWarning)
        layer = SparseLinear.from_linear(pruned[0], columns=16)
        assert layer.matrix.format == "dense" and layer.matrix.density == 0.5
        assert len(sparsify(pruned, columns=16)) == 2


def test_what_is_meant_warns_of_nothing():
    pruned = model()
    for layer in (pruned[0], pruned[2]):
        layer.weight.data = kl.sparse.magnitude(layer.weight.data, 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kl.KernlibWarning)
        SparseLinear.from_linear(pruned[0])
        SparseLinear.from_linear(nn.Linear(64, 64), density=1.0)
        SparseLinear.from_linear(nn.Linear(64, 64), format="dense")
        SparseLinear.from_linear(nn.Linear(64, 64), format="u2")
        sparsify(pruned)
        sparsify(model(), density=0.5)
        sparsify(model(), density=1.0)
        sparsify(model(), format="dense")
        block_sparsify(model(), 16, density=0.5)
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


# Arguments that fit no constructor.


def constructors() -> dict:
    """Of every layer: itself and its public class methods, by name."""
    found = {}
    for module, word in ((kl.nn, ""), (torch_blocksparse, "torch_blocksparse ")):
        for layer in filter(inspect.isclass, (getattr(module, name) for name in module.__all__)):
            if "__init__" in vars(layer):
                found[word + layer.__name__] = layer
            for name, value in vars(layer).items():
                if isinstance(value, classmethod) and name[0] != "_":
                    found[f"{word}{layer.__name__}.{name}"] = getattr(layer, name)
    return found


CONSTRUCTORS = constructors()


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_misspelt_argument_of_every_constructor_is_told_its_name(name):
    make = CONSTRUCTORS[name]
    known = [each for each in inspect.signature(make).parameters if len(each) > 4]
    called = name.rpartition(" ")[2]
    for each in known:
        message = rf"^{called}\(\) got an unexpected keyword argument '\w+'; did you mean {each}\?$"
        with pytest.raises(TypeError, match=message):
            make(**{each[:2] + each[3:]: None})
    with pytest.raises(TypeError, match=f"argument 'zzz'; it takes .*{known[-1]}"):
        make(zzz=1)


MISFITS = {
    "another constructor's": (
        lambda: SparseLinear(64, 64, density=0.5),
        r"^SparseLinear\(\) got an unexpected keyword argument 'density'; "
        r"SparseLinear.from_linear\(\) takes it$",
    ),
    "the constructor's own": (
        lambda: BlockSparseLinear.from_linear(nn.Linear(64, 64), layout=16),
        r"argument 'layout'; BlockSparseLinear\(\) takes it$",
    ),
    "missing": (
        lambda: BlockSparseLinear(1024, 512, density=0.1),
        r"missing 1 required positional argument: 'layout'; the call is "
        r"BlockSparseLinear\(in_features, out_features, layout, bias=True, .* density=None, ",
    ),
    "too many": (
        lambda: SparseLinear.from_linear(nn.Linear(2, 2), "auto", 0.5, "row", None, 1, 1),
        r"takes 2 positional arguments but .*; the call is SparseLinear.from_linear\(linear, \*",
    ),
    "of a function": (lambda: sparsify(model(), densty=0.5), r"'densty'; did you mean density\?$"),
    "of a swap": (lambda: block_sparsify(model(), blok=16), r"'blok'; did you mean block\?$"),
    "of the layers that are swapped in": (
        lambda: replace_linear(model(), {(64, 64): [(4, 16, 16, 1)]}, activaton="relu"),
        r"^0: KSLinear.from_linear\(\) got .* 'activaton'; did you mean activation\?$",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_arguments_that_do_not_fit_say_what_does(case):
    call, message = MISFITS[case]
    with pytest.raises(TypeError, match=message) as caught:
        call()
    assert case == "of the layers that are swapped in" or caught.value.__context__ is None


def test_what_a_constructor_raises_itself_stays_as_it_is():
    inner = TypeError("mine")

    @hinted
    class Made:
        """Says what it is."""

        def __init__(self, value: int, *, other: int = 2):
            if value == 0:
                raise inner
            self.value = len(value) if value is None else value

        @classmethod
        def twice(cls, value: int):
            return cls(2 * value)

    with pytest.raises(TypeError) as caught:
        Made(0)
    assert caught.value is inner
    with pytest.raises(TypeError, match="has no len"):
        Made(None)
    assert Made.twice(2).value == 4 and type(Made.twice(2)) is Made
    assert type("Mine", (Made,), {}).twice(1).__class__.__name__ == "Mine"
    assert str(inspect.signature(Made)) == "(value: int, *, other: int = 2)"
    assert Made.__doc__ == "Says what it is." and Made.twice.__qualname__.endswith("Made.twice")
