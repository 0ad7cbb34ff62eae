"""Block-sparse softmax in torch.compile, and its operators."""

import pytest
import torch

from kernlib.families.blocksparse.softmax import operators
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.families.blocksparse.softmax.functions import softmax
from tests.families.blocksparse.softmax.cases import chance, dense, layout, values

F64 = torch.float64


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No program of another test."""
    yield
    torch._dynamo.reset()


def given():
    """A layout, and tensors with a gradient."""
    made = layout(chance(2, 3, 4), (16, 32))
    key = torch.randn(2, made.shape[1], dtype=F64, requires_grad=True)
    scale = torch.tensor(0.3, dtype=F64, requires_grad=True)
    return made, (values(made, 2, grad=True), scale, dense(made, grad=True), key)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_are_the_same(backend, seed):
    made, tensors = given()
    mask = torch.rand(made.shape) < 0.7

    def call(x, scale, rpe, key):
        return softmax(x, made, scale, rpe, key, mask, causal=True)

    run = torch.compile(call, backend=backend, fullgraph=True)
    found, wanted = run(*tensors), call(*tensors)
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(y, tensors, grad) for y in (found, wanted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_out_of_a_compiled_call(seed):
    made = layout(chance(3, 4), 16)
    run = torch.compile(
        lambda x, out: softmax(x, made, out=out), backend="aot_eager", fullgraph=True
    )
    x = values(made, 2)
    wanted, out = softmax(x, made), torch.empty_like(x)
    run(x, out)
    assert torch.equal(out, wanted)
    run(x, x)
    assert torch.equal(x, wanted)


@pytest.mark.slow
def test_the_operators_keep_their_word(seed):
    made, (x, scale, rpe, key) = given()
    text = BlockSparseSoftmax(rpe=True, key_padding_mask="add").text
    parts = [*made.tensors], made.text
    torch.library.opcheck(
        operators.whole.overload, (x, *parts, scale, 1.0, text, rpe, key, None, False)
    )
    plain = BlockSparseSoftmax().text
    torch.library.opcheck(
        operators.whole.overload, (x, *parts, None, 2.0, plain, *[None] * 3, False)
    )
    grad = torch.randn_like(x)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            operators.gradient.overload, (grad, x, *parts, scale, 1.0, *needs, False)
        )


def test_the_operator_maps(seed):
    """Over x, rpe and the padding by the operator, over the scale and the mask by torch's."""
    made, (x, scale, rpe, key) = given()
    attn = torch.randn(made.shape, dtype=F64)
    text = BlockSparseSoftmax(rpe=True, key_padding_mask="add", attn_mask="add").text
    parts = [*made.tensors], made.text
    shared = {"x": x, "scale": scale, "rpe": rpe, "key": key, "attn": attn}
    mapped = {name: torch.stack([t, t + 0.1, t - 0.3], -1) for name, t in shared.items()}

    def call(x, scale, rpe, key, attn):
        return operators.whole.overload(x, *parts, scale, 1.0, text, rpe, key, attn, False)

    for over in (("x",), ("rpe", "key"), ("x", "scale"), ("attn",)):
        tensors = [(mapped if name in over else shared)[name] for name in shared]
        dims = tuple(-1 if name in over else None for name in shared)
        found = torch.vmap(call, dims)(*tensors)
        for index in range(3):
            own = [
                t if dim is None else t[..., index] for t, dim in zip(tensors, dims, strict=True)
            ]
            torch.testing.assert_close(found[index], call(*own))
    with pytest.raises(NotImplementedError, match="over a layout is not known"):
        torch.vmap(lambda counts: operators.whole.overload(
            x, [*made.tensors[:5], counts], made.text, None, 1.0, BlockSparseSoftmax().text,
            None, None, None, False,
        ))(torch.stack([made.tensors[5]] * 2))  # fmt: skip
