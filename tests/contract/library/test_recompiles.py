"""Two compiled programs, of which the first has constants, hold for every layout, matrix, pattern
and size."""

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib.blocksparse import Layout, attention, dsd
from kernlib.families.blocksparse.layout import NAMES
from tests.contract.library.calls import compiled
from tests.contract.library.recompiles import CASES, compiles, stored
from tests.support.dynamo_messages import said

MOST = 2


@pytest.mark.few(4)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("case", CASES)
def test_twelve_calls_take_two_programs(case, dynamic):
    assert 1 <= compiles(CASES[case](), dynamic) <= MOST


@pytest.mark.few(4)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "case",
    ["`blocksparse.dds`, gradients", "`BlockSparseLinear`, 12 sizes", "`kron_matmul`, gradients"],
)
def test_gradients_take_no_more(case, dynamic):
    assert compiles(CASES[case](), dynamic, "aot_eager") <= MOST


def test_bits_of_one_word_a_line_and_of_several_take_no_program_of_their_own():
    layouts = [
        Layout(torch.ones(grid, dtype=torch.bool), 16) for grid in ((2, 3), (4, 20), (5, 40))
    ]
    given = [(dsd, (stored(made), torch.randn(made.shape[1], 5), made)) for made in layouts]
    assert compiles(iter(given), None) == 2


def test_nothing_of_a_layout_is_text_of_the_graph():
    graphs = []

    def keep(graph_module, inputs):
        graphs.append(graph_module.code)
        return graph_module

    layout = Layout([[1, 0, 1], [0, 1, 1]], 16, 7)
    w = kl.sparse.compress(torch.eye(40, 72), "u8")
    compiled(dsd, keep)(stored(layout), torch.randn(48, 5), layout)
    compiled(kl.sparse.matmul, keep)(w, torch.randn(2, 72))
    compiled(kl.kron_matmul, keep)(torch.randn(2, 15), [torch.randn(3, 4), torch.randn(5, 6)])
    for code, text in zip(
        graphs, ("'16x16 blocks'", "'u8 float32 parts width joined'", "'right'"), strict=True
    ):
        assert text in code and not any(size in code for size in ("capacity", "40x72", "(3, 4)"))


def test_a_layer_leaves_the_settings_of_dynamo_as_they_were():
    config = torch._dynamo.config
    names = "force_parameter_static_shapes", "force_nn_module_property_static_shapes"
    before = [getattr(config, name) for name in names]
    compiled(kl.nn.KroneckerLinear((2, 3), (4, 5)))(torch.randn(2, 6))
    assert [getattr(config, name) for name in names] == before == [True, True]
    counts = [compiles(iter(given), None) for given in (dense_layers(3), sparse_layers(3))]
    assert counts == [3, 2]  # torch's own layers still have one a size


def test_a_trace_that_fails_leaves_the_settings_of_dynamo_as_they_were():
    config = torch._dynamo.config
    layer = kl.nn.SparseLinear.from_linear(nn.Linear(32, 32), density=0.3)
    del layer.bias
    with pytest.raises(Exception, match="bias"):
        compiled(layer)(torch.randn(2, 32))
    assert config.force_parameter_static_shapes and config.force_nn_module_property_static_shapes


def test_a_compiled_layer_does_not_go_by_a_matrix_that_it_does_not_read(seed):
    made, other = (kl.nn.SparseLinear.from_linear(nn.Linear(32, 32), density=0.3) for _ in "ab")
    x, state = torch.randn(5, 32), other.state_dict()
    with pytest.raises(Exception, match=said("load_state_dict makes it the layer's")):
        compiled(lambda x: torch.func.functional_call(made, state, (x,)))(x)
    made.weight_packed = state["weight_packed"]
    with pytest.raises(Exception, match=said("load_state_dict makes it the layer's")):
        compiled(made)(x)
    made.load_state_dict(state)
    torch.testing.assert_close(compiled(made)(x), other(x))


def test_a_compiled_layer_refuses_a_mark_that_it_does_not_read(seed):
    made, other = (kl.nn.BlockSparseLinear(64, 96, 16, density=d, capacity=20) for d in (0.3, 0.6))
    x, state, refused = torch.randn(3, 64), other.state_dict(), said("compiled calls do not read")
    with pytest.raises(Exception, match=refused):
        compiled(lambda x: torch.func.functional_call(made, state, (x,)))(x)
    with pytest.raises(Exception, match=refused):
        compiled(lambda state, x: torch.func.functional_call(made, state, (x,)))(state, x)
    own = dict(made.named_parameters()) | dict(made.named_buffers())
    run = compiled(lambda x: torch.func.functional_call(made, own, (x,)))
    torch.testing.assert_close(run(x), made(x))
    made.index_mark = made.index_mark.clone()  # of the same blocks, as by name
    torch.testing.assert_close(compiled(made)(x), made(x))
    made.load_state_dict(state)
    torch.testing.assert_close(compiled(made)(x), other(x))


def dense_layers(count):
    return [(nn.Linear(4 + i, 6), (torch.randn(2, 4 + i),)) for i in range(count)]


def sparse_layers(count):
    layers = [kl.nn.KroneckerLinear((2, 2 + i), (3, 4)) for i in range(count)]
    return [(layer, (torch.randn(2, layer.in_features),)) for layer in layers]


def test_a_compiled_layer_takes_the_blocks_that_functional_call_gives_it():
    made, other = (kl.nn.BlockSparseLinear(64, 96, 16, density=d, capacity=20) for d in (0.3, 0.6))
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    state.update({f"layout_{name}": getattr(other, f"layout_{name}") for name in NAMES})
    x = torch.randn(3, 64)
    run = compiled(lambda given, x: torch.func.functional_call(made, given, (x,)))
    assert torch.equal(run(state, x), other(x))


# A layout that is made inside.


@pytest.mark.parametrize("heads", [(), (2,)])
def test_a_layout_made_inside_is_the_one_made_outside(heads):
    mask = torch.rand(*heads, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.6

    def run(q, k, v, mask):
        layout = Layout(mask, 16, capacity=40)
        return attention(q, k, v, layout), layout

    given = [torch.randn(1, 2, rows, 8, requires_grad=True) for rows in (48, 80, 80)]
    found, layout = compiled(run)(*given, mask)
    wanted, outside = run(*given, mask)
    assert (layout.text, layout.capacity) == (outside.text, 40)
    assert all(map(torch.equal, layout.tensors, outside.tensors))
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(y.sum(), given) for y in (found, wanted)]
    torch.testing.assert_close(*slopes)


REFUSED = {
    "capacity must be given": lambda mask, layout: Layout(mask, 16),
    "from_indices does not work inside": lambda *_: Layout.from_indices([0], [1], (2, 2), 16),
    "kernlib.blocksparse does not work inside": lambda *_: kl.blocksparse.causal(64, 16),
    "update_ does not work inside": lambda mask, layout: layout.update_(mask),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_layout_inside_says_what_would(message):
    mask = torch.ones(2, 3, dtype=torch.bool)
    given = mask, Layout(mask, 16)

    def run(mask, layout):
        return REFUSED[message](mask, layout).flat[0] + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match=said(message)):
        compiled(run, "eager")(*given)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, backend="eager")(*given), run(*given))


def test_too_many_blocks_for_a_layout_made_inside():
    run = compiled(lambda mask: Layout(mask, 16, capacity=2).flat[0] + 1)
    with pytest.raises(ValueError, match="more than the layout's capacity of 2"):
        run(torch.ones(3, 3, dtype=torch.bool))


def test_texts_of_programs_that_were_saved_before_hold():
    """These have all of a layout, a matrix or a descriptor in their texts."""
    layout = Layout([[1, 0, 1], [0, 1, 1]], 16, 7)
    values, b = stored(layout), torch.randn(48, 5)
    product = torch.ops.kernlib.blocksparse_matmul_product
    text = kl.BlockSparseMatmul("dsd").text
    found = product(values, b, [*layout.tensors], layout.text, text, None, False)
    torch.testing.assert_close(found, dsd(values, b, layout))
    w, x = kl.sparse.compress(torch.eye(40, 72), "u8"), torch.randn(2, 72)
    product = torch.ops.kernlib.sparse_matmul_product
    found = product(x, [*w.operands], [], w.layout, "", None, False, False)
    torch.testing.assert_close(found, x[:, :40])
