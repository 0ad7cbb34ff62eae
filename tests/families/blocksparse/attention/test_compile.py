"""Block-sparse attention in torch.compile and export, and its operators."""

import pytest
import torch

from kernlib.families.blocksparse.attention import operators
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.functions import attention
from tests.families.blocksparse.attention.cases import F32, F64, LOWEST, Shape

SHAPE = Shape()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No program of another test."""
    yield
    torch._dynamo.reset()


def given(shape: Shape = SHAPE):
    """A layout, and tensors with a gradient."""
    tensors = (
        *shape.tensors(),
        torch.randn(shape.heads, shape.queries, shape.keys, dtype=F64),
        torch.randn((), dtype=F64),
    )
    return shape.layout(shape.heads), tuple(t.requires_grad_() for t in tensors)


def finite(pair):
    out, lse = pair
    return out, torch.where(lse == LOWEST, 0.0, lse)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_are_the_same(backend, seed):
    made, tensors = given()
    lengths = torch.tensor([40, 70])

    def call(q, k, v, bias, gain):
        return finite(attention(
            q * 2, k, v, made, scale=0.3, causal=True, window=(30, None), kv_lengths=lengths,
            score="gain * tanh(v) + bias", mask="row - col > 1", bias=bias, gain=gain,
            return_lse=True,
        ))  # fmt: skip

    run = torch.compile(call, backend=backend, fullgraph=True)
    found, wanted = run(*tensors), call(*tensors)
    torch.testing.assert_close(found, wanted)
    grads = [torch.randn_like(t) for t in wanted]
    ours, theirs = (torch.autograd.grad(y, tensors, grads) for y in (found, wanted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_a_layout_may_be_an_argument_and_numbers_may_change(seed):
    run = torch.compile(
        lambda q, k, v, made, window: attention(q * 2, k, v, made, window=window),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    for count in (50, 40):
        shape = SHAPE._replace(queries=count)
        made, (q, k, v) = shape.layout(), shape.tensors()
        for window in (10, 20, (7, 30)):
            found = run(q, k, v, made, window)
            torch.testing.assert_close(found, attention(q * 2, k, v, made, window=window))


@pytest.mark.slow
def test_dropout_of_a_compiled_call(seed):
    made, tensors = given()
    q, k, v = tensors[:3]
    state = torch.tensor(7)
    run = torch.compile(
        lambda q, seed: attention(q, k, v, made, dropout_p=0.5, seed=seed),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    found, wanted = run(q, state), attention(q, k, v, made, dropout_p=0.5, seed=7)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(y, q, grad) for y in (found, wanted))
    torch.testing.assert_close(ours, theirs)
    drawn = torch.compile(
        lambda q: attention(q, k, v, made, dropout_p=0.5), backend="aot_eager", fullgraph=True
    )
    assert not torch.equal(drawn(q), drawn(q))


@pytest.mark.slow
def test_out_of_a_compiled_call(seed):
    made, (q, k, v) = SHAPE.layout(), SHAPE.tensors()
    run = torch.compile(
        lambda q, out: attention(q, k, v, made, out=out), backend="aot_eager", fullgraph=True
    )
    wanted = attention(q, k, v, made)
    out = torch.empty_like(wanted)
    run(q, out)
    torch.testing.assert_close(out, wanted)


@pytest.mark.slow
def test_exported_programs(seed):
    made, (q, k, v) = SHAPE.layout(), SHAPE.tensors(F32)

    class Attends(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, made, score="v + row - col", return_lse=True)

    program = torch.export.export(Attends(), (q, k, v))
    assert "kernlib.blocksparse_attention" in str(program.graph)
    for ours, theirs in zip(program.module()(q, k, v), Attends()(q, k, v), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fake_tensors(seed):
    made, tensors = SHAPE.layout(), SHAPE.tensors(torch.float16)
    meta = [t.to("meta") for t in tensors]
    out, lse = attention(*meta, made.to("meta"), return_lse=True)
    assert out.shape == (2, 4, 50, 5) and out.is_meta and lse.dtype == F32
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = [mode.from_tensor(t) for t in tensors]
        out = attention(*faked, made)
    assert out.shape == (2, 4, 50, 5) and out.dtype == torch.float16


@pytest.mark.slow
def test_the_operators_keep_their_word(seed):
    # Torch traces second derivatives of symbolic sizes: of 4 heads 50 s for each gradient.
    made, (q, k, v, bias, gain) = given(Shape(heads=2, kv_heads=1))
    captured = {"bias": ("head", "row", "col"), "gain": ()}
    text = BlockSparseAttention(score="v * gain + bias", captured=captured, dropout=True).text
    parts = [*made.tensors], made.text
    scale, seeded = torch.tensor(0.4, dtype=F64), torch.tensor(5)
    numbers = scale, 1.0, 3, 4, None, None, 0.2, seeded, 0
    request = q, k, v, *parts, text, *numbers, [bias, gain]
    torch.library.opcheck(operators.whole.overload, (*request, False))
    out, lse = (t.detach() for t in operators.whole.overload(*request, False))
    plain = q, k, v, *parts, BlockSparseAttention().text, None, 0.5, 0, 0, None, None, 0.0, None, 0
    torch.library.opcheck(operators.whole.overload, (*plain, [], False))
    grads = torch.randn_like(out), torch.randn_like(lse)
    for needs in ([True] * 5, [False, True, False, True, False]):
        given_needs = (*grads, out, lse, *request, needs, False)
        torch.library.opcheck(operators.gradient.overload, given_needs)
    torch.library.opcheck(
        operators.gradient.overload, (grads[0], None, out, lse, *plain, [], [True] * 3, False)
    )


@pytest.mark.slow
def test_the_operator_maps(seed):
    made, (q, k, v, bias, _) = given()
    text = BlockSparseAttention(score="v + bias", captured={"bias": ("head", "row", "col")}).text

    def call(q, bias):
        parts = [*made.tensors], made.text, text
        request = q, k, v, *parts, None, 0.5, 0, 0, None, None, 0.0, None, 0, [bias], False
        return operators.whole.overload(*request)[0]

    queries, biases = torch.stack([q, 2 * q], -1), torch.stack([bias, -bias], 1)
    found = torch.vmap(call, (-1, 1))(queries, biases)
    for index in range(2):
        torch.testing.assert_close(found[index], call(queries[..., index], biases[:, index]))
    found = torch.vmap(call, (None, 1))(q, biases)
    torch.testing.assert_close(found[1], call(q, -bias))
