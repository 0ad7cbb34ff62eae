"""MACKO's names on CPU tensors: its own six tests, and what it gets wrong."""

import pytest
import sparse_macko_cases as cases
import torch

from kernlib.compat import macko

HALF = torch.float16


@pytest.mark.parametrize("name", ("G1", "G2", "G3"))
def test_golden_vectors(name):
    dense, (values, deltas, row_ptr) = cases.golden()[name]
    compressed = macko.compress(dense)
    assert isinstance(compressed, tuple) and compressed[3:] == tuple(dense.shape)
    assert [t.dtype for t in compressed[:3]] == [HALF, torch.uint8, torch.int32]
    found = [compressed[0].view(torch.int16).tolist(), *(t.tolist() for t in compressed[1:3])]
    assert found == [values, deltas, row_ptr]


def test_small_product():
    dense, _ = cases.golden()["G1"]
    x = torch.linspace(-1, 1, 32).to(HALF)
    assert torch.allclose(macko.multiply(macko.compress(dense), x), dense @ x)


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


def test_any_strides(seed):
    dense, x = cases.random(30, 50, 0.3), torch.randn(100).to(HALF)
    compressed = macko.compress(dense.mT.contiguous().mT)
    found = macko.multiply(compressed, x[::2])
    assert torch.equal(found, macko.multiply(compressed, x[::2].contiguous()))


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
    for wrong in (x[:-1], torch.ones(21, dtype=HALF), x[None], torch.ones(20, 1, dtype=HALF)):
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
    with pytest.raises(RuntimeError, match="requires a gradient"):
        macko.multiply(compressed, x.clone().requires_grad_())


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
