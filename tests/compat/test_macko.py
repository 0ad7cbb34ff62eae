"""MACKO's names on CPU tensors: values, and what is refused."""

import pytest
import torch

from kernlib.compat import macko
from tests.families.sparse.formats import macko_cases as cases

HALF = torch.float16


@pytest.mark.parametrize("name", ("G1", "G2", "G3"))
def test_golden_vectors(name):
    dense, (values, deltas, row_ptr) = cases.golden()[name]
    compressed = macko.compress(dense)
    assert isinstance(compressed, tuple) and compressed[3:] == tuple(dense.shape)
    assert [t.dtype for t in compressed[:3]] == [HALF, torch.uint8, torch.int32]
    found = [compressed[0].view(torch.int16).tolist(), *(t.tolist() for t in compressed[1:3])]
    assert found == [values, deltas, row_ptr]


@pytest.mark.parametrize("density", (1.0, 0.5, 0.1, 0.01, 0.001, 0.0))
def test_products(density, seed):
    dense = cases.random(512, 1024, density) / 32
    x = torch.randn(1024).to(HALF)
    compressed = macko.compress(dense)
    y = macko.multiply(compressed, x)
    wanted = (dense.double() @ x.double()).to(HALF)
    assert torch.allclose(y, wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(macko.decompress(compressed), dense)


@pytest.mark.parametrize("shape", ((0, 0), (0, 5), (5, 0), (1, 1), (3, 7)))
def test_shapes(shape, seed):
    dense = cases.random(*shape, 0.5)
    compressed = macko.compress(dense)
    assert torch.equal(macko.decompress(compressed), dense)
    y = macko.multiply(compressed, torch.ones(shape[1], dtype=HALF))
    assert torch.allclose(y, dense.float().sum(1).to(HALF), rtol=2e-3, atol=2e-3)
    assert all(t.device.type == "cpu" for t in macko.move_to_device(compressed, "cpu")[:3])


def test_what_is_refused(seed):
    dense = cases.random(8, 20, 0.3)
    compressed = macko.compress(dense)
    x = torch.ones(20, dtype=HALF)
    with pytest.raises(RuntimeError, match=r"M must be torch\.half"):
        macko.compress(dense.float())
    with pytest.raises(ValueError, match="M must be a matrix"):
        macko.compress(x)
    with pytest.raises(TypeError, match="M must be a tensor"):
        macko.compress([[1.0]])
    for wrong in (x[:-1], torch.ones(21, dtype=HALF), x[:, None], x.expand(2, 20), x[0]):
        with pytest.raises(ValueError, match=r"\(20,\).*\(8, 20\)"):
            macko.multiply(compressed, wrong)
    with pytest.raises(ValueError, match="V must have dtype"):
        macko.multiply(compressed, x.float())
    with pytest.raises(ValueError, match="V is on meta"):
        macko.multiply(compressed, x.to("meta"))
    with pytest.raises(ValueError, match="row_ptr of a 9 x 20 matrix"):
        macko.multiply((*compressed[:3], 9, 20), x)
    with pytest.raises(ValueError, match="deltas must have dtype"):
        macko.multiply((compressed[0], compressed[1].int(), *compressed[2:]), x)
    with pytest.raises(ValueError, match="a tuple"):
        macko.decompress(compressed[:3])
    for given, words in (
        (None, "a compressed matrix must be a tuple"),
        ((None, *compressed[1:]), "values must be a tensor, got NoneType"),
        ((*compressed[:3], 8.0, 20), r"rows must be an int, got 8\.0"),
        ((*compressed[:3], 8, -20), "columns must be at least 0, got -20"),
        ((*compressed[:2], compressed[2][:0], -1, 20), "rows must be at least 0, got -1"),
    ):
        for call in (
            macko.decompress,
            lambda c: macko.multiply(c, x),
            lambda c: macko.move_to_device(c, "cpu"),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                call(given)
    with pytest.raises(TypeError, match=r"V must be a tensor, got list"):
        macko.multiply(compressed, [1.0] * 20)
    with pytest.raises(TypeError, match=r"device must be a torch\.device, str or int"):
        macko.move_to_device(compressed, None)
    with pytest.raises(ValueError, match="device must be one of torch's"):
        macko.move_to_device(compressed, "nosuch")
    with pytest.raises(ValueError, match="more bytes than torch counts"):
        macko.decompress((*compressed[:4], 2**62))
    with pytest.raises(RuntimeError, match="requires a gradient"):
        macko.multiply(compressed, x.clone().requires_grad_())


def test_vectors_behind_ones(seed):
    """As MACKO's layer of a language model hands them on: rows of a batch, by vmap."""
    dense = cases.random(8, 20, 0.3)
    compressed, x = macko.compress(dense), torch.randn(1, 3, 20).to(HALF)
    wanted = macko.multiply(compressed, x[0, 1])
    for given in (x[:, 1], x[:, 1:2], x[0, 1]):
        assert torch.equal(macko.multiply(compressed, given), wanted)
    layer = torch.vmap(lambda v: macko.multiply(compressed, v), in_dims=-2, out_dims=-2)
    found = layer(x)
    assert found.shape == (3, 8) and torch.equal(found[1], wanted)
    assert torch.equal(layer(x[:, 1:2]), wanted[None])


def with_bytes(compressed, name: str, change) -> tuple:
    """The tuple with one tensor changed, as a new one."""
    place = ("values", "deltas", "row_ptr").index(name)
    changed = compressed[place].clone()
    change(changed)
    return *compressed[:place], changed, *compressed[place + 1 :]


TAMPERED = {
    "steps": ("deltas", lambda t: t.fill_(255), "deltas must lead to 20 columns at most"),
    "a row beyond": ("row_ptr", lambda t: t[3].fill_(10**6), "row_ptr must rise"),
    "a row before": ("row_ptr", lambda t: t[3].fill_(-5), "row_ptr must rise"),
    "an end beyond": ("row_ptr", lambda t: t[8].fill_(10**6), "row_ptr must rise"),
    "a first row": ("row_ptr", lambda t: t[0].fill_(-8), "row_ptr must rise"),
    "differences that wrap": (
        "row_ptr",
        lambda t: t[1:4].copy_(torch.tensor([2**31 - 1, -(2**31), -1])),
        "falling in between",
    ),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tuples_that_are_no_matrix_are_refused(case, seed):
    name, change, words = TAMPERED[case]
    compressed = macko.compress(cases.random(8, 20, 0.5))
    tampered, x = with_bytes(compressed, name, change), torch.ones(20, dtype=HALF)
    calls = (
        lambda given: macko.multiply(given, x),
        lambda given: torch.ops.macko_spmv.multiply(*given, x),
        macko.decompress,
        lambda given: macko.move_to_device(given, "cpu"),
    )
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call(tampered)
        call(compressed)
    change(dict(zip(("values", "deltas", "row_ptr"), compressed, strict=False))[name])
    for call in calls:  # known, and written since
        with pytest.raises(ValueError, match=words):
            call(compressed)


def test_tuples_are_looked_at_once_and_forgotten(seed, monkeypatch):
    known = len(macko.looked_at)
    compressed, x = macko.compress(cases.random(8, 20, 0.5)), torch.ones(20, dtype=HALF)
    moved, seen = macko.move_to_device(compressed, "cpu"), []
    check = macko.codec.check_stream
    monkeypatch.setattr(macko.codec, "check_stream", lambda *a: seen.append(a) or check(*a))
    macko.multiply(compressed, x), macko.decompress(moved)
    assert not seen
    with torch.inference_mode():
        own = tuple(t.clone() for t in compressed[:3])
    for _ in range(2):
        macko.multiply((*own, 8, 20), x)
        assert len(seen) == 1
    assert len(macko.looked_at) == known + 2
    del compressed, moved, own
    seen.clear()
    assert len(macko.looked_at) == known


def test_tensors_of_any_strides_and_lazy_ones(seed):
    dense = cases.random(8, 20, 0.5)
    values, deltas, row_ptr, *shape = macko.compress(dense)
    strided = values.repeat_interleave(2)[::2], torch._neg_view(-values)
    for given in strided:
        assert torch.equal(macko.decompress((given, deltas, row_ptr, *shape)), dense)
    none = torch._efficientzerotensor(values.shape, dtype=HALF)
    assert not macko.decompress((none, deltas, row_ptr, *shape)).any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", ["values", "deltas", "row_ptr"])
def test_tensors_without_memory_of_their_own_are_refused(name, seed):
    compressed, x = macko.compress(cases.random(8, 20, 0.5)), torch.ones(20, dtype=HALF)
    freed = with_bytes(compressed, name, lambda t: t.untyped_storage().resize_(0))
    place = ("values", "deltas", "row_ptr").index(name)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    nested = *compressed[:place], nested, *compressed[place + 1 :]
    for call in (
        macko.decompress,
        lambda given: macko.multiply(given, x),
        lambda given: macko.move_to_device(given, "cpu"),
    ):
        with pytest.raises(ValueError, match=f"{name} has no memory"):
            call(freed)
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got a nested one"):
            call(nested)


def test_the_operator(seed):
    compressed = macko.compress(cases.random(16, 40, 0.4))
    arguments = (*compressed, torch.randn(40).to(HALF))
    operator = torch.ops.macko_spmv.multiply.default
    torch.library.opcheck(operator, arguments)
    wanted = str(operator._schema)
    assert wanted == (
        "macko_spmv::multiply(Tensor M_values, Tensor M_deltas, Tensor M_row_indices, int M_rows, "
        "int M_cols, Tensor V) -> Tensor"
    )


def test_compiled(seed):
    compressed = macko.compress(cases.random(16, 40, 0.4))
    x = torch.randn(40).to(HALF)
    call = torch.compile(
        lambda v: macko.multiply(compressed, v) * 2, fullgraph=True, backend="eager"
    )
    assert torch.equal(call(x), macko.multiply(compressed, x) * 2)
