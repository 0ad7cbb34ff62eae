"""Where products with Kronecker products write: any strides, y itself, and no memory of another
argument."""

import pytest
import torch

import kernlib as kl
from tests.families.kronecker_product.cases import (
    SHAPES,
    SIDES,
    assert_near,
    operands,
    product,
    randn,
)

SIDE = pytest.mark.parametrize("side", SIDES)
WAYS = {  # of a call with an y or without
    "plain": lambda y: {},
    "alpha": lambda y: {"alpha": 2.0},
    "alpha tensor": lambda y: {"alpha": torch.tensor(2.0)},
    "beta": lambda y: {"beta": 0.5, "y": y},
    "beta 0": lambda y: {"beta": 0, "y": y},
    "beta tensor": lambda y: {"alpha": 3, "beta": torch.tensor(0.5), "y": y},
}
WAY = pytest.mark.parametrize("way", WAYS)
OUTS = {
    "itself": lambda out: out,
    "turned": lambda out: out.mT.contiguous().mT,
    "part": lambda out: torch.zeros([n + 2 for n in out.shape]).to(out)[
        tuple(slice(1, n + 1) for n in out.shape)
    ],
    "strided": lambda out: torch.zeros([2 * n for n in out.shape]).to(out)[
        tuple(slice(1, None, 2) for _ in out.shape)
    ],
    "unaligned": lambda out: torch.zeros(out.numel() + 1).to(out)[1:].view(out.shape),
}


@WAY
@pytest.mark.parametrize("layout", OUTS)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)], ids=str)
@SIDE
def test_out_is_written_in_place_whatever_its_strides(side, batch, layout, way, seed):
    x, factors = operands(SHAPES, 4, side)
    x = randn(*batch, *x.shape)
    wanted = kl.kron_matmul(x, factors, side=side)
    arguments = WAYS[way](randn(*wanted.shape[-2:]))
    wanted = kl.kron_matmul(x, factors, side=side, **arguments)
    out = OUTS[layout](torch.full_like(wanted, float("nan")))
    version = out._version
    assert kl.kron_matmul(x, factors, side=side, out=out, **arguments) is out
    assert torch.equal(out, wanted) and (out._version > version or not out.numel())


@pytest.mark.parametrize("rows", [0, 1, 4, 129])
@SIDE
def test_what_lies_around_out_is_left_alone(side, rows, seed):
    x, factors = operands(SHAPES, rows, side)
    shape = product(x, factors, side).shape
    for make in WAYS.values():
        around = torch.full([n + 4 for n in shape], 7.0).double()
        kl.kron_matmul(x, factors, side=side, out=around[2:-2, 2:-2], **make(randn(shape[-1])))
        around[2:-2, 2:-2] = 7
        assert (around == 7).all()


@pytest.mark.parametrize("beta", [0, 1, -0.5, torch.tensor(0.5)], ids=str)
@SIDE
def test_out_may_be_y(side, beta, seed):
    x, factors = operands(SHAPES, 4, side)
    wanted = product(x, factors, side)
    for layout in OUTS.values():
        y = layout(randn(*wanted.shape))
        y.copy_(randn(*wanted.shape))
        whole = 3 * wanted + beta * y
        assert kl.kron_matmul(x, factors, alpha=3, beta=beta, y=y, side=side, out=y) is y
        assert_near(y, whole, 1e-12)


def test_an_unread_y_that_is_not_a_number_may_be_out(seed):
    x, factors = operands(SHAPES, 4)
    y = torch.full((4, 15), float("nan")).double()
    kl.kron_matmul(x, factors, beta=0.0, y=y, out=y)
    assert_near(y, product(x, factors))


SHARED = {  # x, factor, out and the name of what they share
    "x itself": lambda m, f: (m[:4, :6], f, m[:4, :6], "x"),
    "x's last element": lambda m, f: (m[:4, :6], f, m[3:7, 5:11], "x"),
    "x turned": lambda m, f: (m[:6, :6], f, m[:6, :6].T, "x"),
    "x in a batch": lambda m, f: (
        m[:4, :6].expand(2, 4, 6),
        f,
        torch.stack((m, m))[:, :4, :6],
        None,
    ),
    "the first factor": lambda m, f: (m[:2, :6], f, f[0][:2, :3].view(1, 6), "factors[0]"),
    "the last factor": lambda m, f: (m[:1, :6], f, f[1].view(-1)[:6].view(1, 6), "factors[1]"),
    "interleaved": lambda m, f: (m[:4, :12:2], f, m[:4, 1:12:2], None),
}


@WAY
@pytest.mark.parametrize("case", SHARED)
def test_out_must_not_share_memory_with_an_operand(case, way, seed):
    first, second = randn(2, 2), randn(3, 3)
    if case == "the first factor":
        first, second = randn(3, 3), randn(2, 2)
    x, factors, out, name = SHARED[case](randn(12, 12), (first, second))
    if name == "factors[0]":
        x, out = x[:1], first.view(-1)[:6].view(1, 6)
    arguments = WAYS[way](randn(6))
    wanted = kl.kron_matmul(x, factors, **arguments)
    before = out.clone()
    if name is None:
        assert torch.equal(kl.kron_matmul(x, factors, out=out, **arguments), wanted)
        return
    with pytest.raises(ValueError, match=f"out shares memory with {name.replace('[', '.')[:8]}"):
        kl.kron_matmul(x, factors, out=out, **arguments)
    assert torch.equal(out, before)


@WAY
def test_a_vectors_out_must_not_share_memory_either(way, seed):
    x, factors = randn(6), [randn(2, 2), randn(3, 3)]
    with pytest.raises(ValueError, match="out shares memory with x;"):
        kl.kron_matmul(x, factors, out=x, **WAYS[way](randn(6)))


PARTLY = {  # y of a result (4, 15), and out
    "rows on": lambda m: (m[:4, :15], m[1:5, :15]),
    "features on": lambda m: (m[:4, :15], m[:4, 1:16]),
    "one row": lambda m: (m[0, :15], m[:4, :15]),
    "one column": lambda m: (m[:4, :1], m[:4, :15]),
    "one element": lambda m: (m[3, 14], m[:4, :15]),
    "expanded": lambda m: (m[:1, :15].expand(4, 15), m[:4, :15]),
    "other strides": lambda m: (m.view(-1)[:60].view(4, 15), m[:4, :15]),
}


@pytest.mark.parametrize("beta", [0, 0.5, torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("case", PARTLY)
def test_out_must_not_share_a_part_of_y(case, beta, seed):
    x, factors = operands(SHAPES, 4)
    y, out = PARTLY[case](randn(8, 20))
    before = out.clone()
    with pytest.raises(ValueError, match="out shares memory with y;"):
        kl.kron_matmul(x, factors, beta=beta, y=y, out=out)
    assert torch.equal(out, before)
    apart = kl.kron_matmul(x, factors, beta=beta, y=y)
    assert torch.equal(kl.kron_matmul(x, factors, beta=beta, y=y.clone(), out=out), apart)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_nor_a_number(name, seed):
    x, factors = operands(SHAPES, 4)
    out = randn(4, 15)
    numbers = {"alpha": 2.0, "beta": 3.0} | {name: out[2, 3]}
    with pytest.raises(ValueError, match=f"out shares memory with {name};"):
        kl.kron_matmul(x, factors, y=randn(15), out=out, **numbers)


def test_parts_of_one_tensor_that_share_nothing_may_be_y_and_out(seed):
    x, factors = operands(SHAPES, 4)
    memory = randn(4, 30)
    for y, out in ((memory[:, :15], memory[:, 15:]), (memory[:, ::2], memory[:, 1::2])):
        wanted = product(x, factors) + y
        assert_near(kl.kron_matmul(x, factors, beta=1, y=y, out=out), wanted)


@WAY
@pytest.mark.parametrize("name", ["x", "factors[0]", "factors[1]", "y", "out"])
def test_out_takes_no_result_whose_gradient_is_recorded(name, way, seed):
    x, factors = operands(SHAPES, 3)
    y, out = randn(3, 15), torch.zeros(3, 15).double()
    given = {"x": x, "factors[0]": factors[0], "factors[1]": factors[1], "y": y, "out": out}
    given[name].requires_grad_()
    arguments = WAYS[way](y)
    if name != "y" or ("y" in arguments and way != "beta 0"):
        with pytest.raises(RuntimeError, match="out takes no result whose gradient is recorded"):
            kl.kron_matmul(x, factors, out=out, **arguments)
        assert not out.any()
    with torch.no_grad():
        kl.kron_matmul(x, factors, out=out, **arguments)
        assert torch.equal(out, kl.kron_matmul(x, factors, **arguments))


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_nor_one_by_a_number_with_a_gradient(name):
    x, factors = operands(SHAPES, 3)
    numbers = {"alpha": torch.tensor(2.0), "beta": torch.tensor(3.0)}
    numbers[name].requires_grad_()
    with pytest.raises(RuntimeError, match="out takes no result whose gradient is recorded"):
        kl.kron_matmul(x, factors, y=randn(15), out=randn(3, 15), **numbers)


def test_under_autocast_out_has_its_dtype(seed):
    x, factors = operands(SHAPES, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for make in WAYS.values():
            arguments = make(torch.randn(15))
            out = torch.empty(3, 15, dtype=torch.bfloat16)
            kl.kron_matmul(x, factors, out=out, **arguments)
            assert torch.equal(out, kl.kron_matmul(x, factors, **arguments))
            with pytest.raises(TypeError, match=r"out must be torch\.bfloat16 as x is, .*float32"):
                kl.kron_matmul(x, factors, out=torch.empty(3, 15), **arguments)
