"""Every bad call of a block-sparse product says which argument is wrong, and what was given."""

import math
from functools import partial

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse import operators
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime import operation

LAYOUT = Layout([[1, 0, 1], [0, 1, 0]], (16, 32))  # 32 rows, 96 columns
HEADS = Layout([[[1, 0, 1], [0, 1, 0]]] * 2, (16, 32))
DSD = BlockSparseMatmul("dsd")
BIASED = BlockSparseMatmul("dsd", epilogue=(kl.Bias(), kl.Gelu()))
SCALED = BlockSparseMatmul("dds", epilogue=kl.Scale())
ADDED = BlockSparseMatmul("sdd", epilogue=kl.Add())


def ones(*shape, **options):
    return torch.ones(shape, **options)


V, B, BIAS = ones(3, 16, 32), ones(96, 5), ones(32)
A, K = ones(5, 32), ones(5, 96)
LEFT, Y = ones(32, 5), ones(3, 16, 32)


def sparse(x):
    return x.to_sparse()


def meta(t):
    return t.to("meta")


def nested():
    return torch.nested.nested_tensor([ones(3), ones(2)])


def inference(*shape):
    with torch.inference_mode():
        return ones(*shape)


def by(function, *tensors, **arguments):
    return lambda: function(*tensors, **arguments)


def call(descriptor, *tensors, **arguments):
    return lambda: kl.run_kernel(descriptor, *tensors, **arguments)


of_dsd = partial(by, dsd, V, B, LAYOUT)
TEXT = r"16x32 blocks, 2x3 grid, no heads, capacity 3"
FLOATS = "float32, float16, bfloat16, float64"

TYPE_ERRORS = {
    "values list": (by(dsd, [1.0], B, LAYOUT), "values must be a tensor, got list"),
    "values sparse": (by(dsd, sparse(V), B, LAYOUT), "values must be a dense .*sparse_coo"),
    "values nested": (by(dsd, nested(), B, LAYOUT), "values must be a dense tensor, got a nested"),
    "values int": (by(dsd, V.int(), B.int(), LAYOUT), f"values must be one of {FLOATS}, got .*int"),
    "b sparse": (by(sdd, LEFT, sparse(K), LAYOUT), "b must be a dense tensor, .*sparse_coo"),
    "two dtypes": (
        by(dsd, V, B.double(), LAYOUT),
        "values and b must have one dtype, got torch.float32 and torch.float64",
    ),
    "two dtypes of dds": (by(dds, A.half(), V, LAYOUT), "a and values must have one dtype"),
    "two dtypes of sdd": (by(sdd, LEFT, K.half(), LAYOUT), "a and b must have one dtype"),
    "layout mask": (
        by(dsd, V, B, torch.ones(2, 3)),
        r"layout must be a kernlib\.blocksparse\.Layout, got Tensor; Layout\(mask, block\)",
    ),
    "transpose_a 1": (of_dsd(transpose_a=1), "transpose_a must be a bool, got 1"),
    "epilogue text": (of_dsd(epilogue="relu"), "epilogue must be made of epilogues .*'relu'"),
    "debug 1": (of_dsd(debug=1), "debug must be a bool, got 1"),
    "unknown": (of_dsd(gain=1), r"gain is no argument of BlockSparseMatmul\(dsd\); it takes none"),
    "by position": (by(dsd, V, B, LAYOUT, True), "positional"),
    "no layout": (by(dsd, V, B), "layout"),
    # run_kernel
    "two operands": (
        call(DSD, LAYOUT, V),
        r"BlockSparseMatmul\(dsd\) takes layout, a and b, got 2 operands",
    ),
    "no layout first": (call(DSD, V, B, LAYOUT), "layout must be a kernlib.*, got Tensor"),
    "class as descriptor": (call(BlockSparseMatmul, LAYOUT, V, B), "descriptor must be"),
    "bias number": (call(BIASED, LAYOUT, V, B, bias=1.0), r"bias must be .*\(32,\), got float"),
    "bias double": (call(BIASED, LAYOUT, V, B, bias=BIAS.double()), "bias must have one dtype"),
    "scale text": (call(SCALED, LAYOUT, A, V, scale="2"), "scale must be a real number .*'2'"),
}
VALUE_ERRORS = {
    "values short": (
        by(dsd, V[:2], B, LAYOUT),
        r"values must hold the layout's blocks, \(\.\.\., 3, 16, 32\), got \(2, 16, 32\)",
    ),
    "values dense": (by(dsd, LAYOUT.to_dense(V), B, LAYOUT), "values must hold .*got .32, 96."),
    "b rows": (
        by(dsd, V, ones(95, 5), LAYOUT),
        rf"b must be \(\.\.\., 96, n\) for a layout of {TEXT}, got \(95, 5\)",
    ),
    "b turned": (by(dsd, V, B.mT, LAYOUT), "96, n.*5, 96.; did you mean transpose_b=True.$"),
    "b not turned": (
        of_dsd(transpose_b=True),
        rf"b must be \(\.\.\., n, 96\) for a layout of {TEXT} and transpose_b, got \(96, 5\); "
        "did you mean transpose_b=False.$",
    ),
    "S turned": (of_dsd(transpose_a=True), r"b must be \(\.\.\., 32, n\) .*transpose_a=False.$"),
    "b number": (by(dsd, V, ones(), LAYOUT), r"b must be .*got \(\)"),
    "S not turned": (by(dds, ones(5, 96), V, LAYOUT), "did you mean transpose_b=True.$"),
    "a turned": (
        by(dds, A, V, LAYOUT, transpose_a=True),
        r"a must be \(\.\.\., 32, n\) .* and transpose_a, got \(5, 32\)",
    ),
    "a of sdd turned": (by(sdd, LEFT.mT, K, LAYOUT), "did you mean transpose_a=True.$"),
    "a of sdd": (by(sdd, ones(31, 5), K, LAYOUT), r"a must be \(\.\.\., 32, n\) .*\(31, 5\)"),
    "two sizes": (
        by(sdd, ones(32, 4), K, LAYOUT),
        r"a and b must have one size to sum over, got 4 of a \(32, 4\) and 5 of b \(5, 96\)",
    ),
    "a without heads": (
        by(sdd, LEFT, ones(2, 5, 96), HEADS),
        r"a must be \(\.\.\., 2, 32, n\) for a layout of .*2 heads.*got \(32, 5\)$",
    ),
    "a of other heads": (
        by(sdd, ones(3, 32, 5), ones(2, 5, 96), HEADS),
        r"a must have 2 heads, or 1, got \(3, 32, 5\)",
    ),
    "batches": (
        by(dsd, ones(2, 3, 16, 32), ones(3, 96, 5), LAYOUT),
        r"dimensions in front .* must broadcast, got those of values \(2,\) and b \(3,\)",
    ),
    "devices": (by(dsd, V, meta(B), LAYOUT), "values and b must be on one device.*cpu and meta"),
    "layout's device": (
        by(dds, meta(A), meta(V), LAYOUT),
        r"layout must be on the device of a, meta, got cpu; layout\.to\(device\) makes a copy",
    ),
    "bias of sdd": (
        by(sdd, LEFT, K, LAYOUT, epilogue=kl.Bias()),
        "mode 'sdd' takes no epilogue with a value for each feature",
    ),
    "precision": (of_dsd(precision="fp8"), "precision must be None or one of .*'fp8'"),
    "bias missing": (of_dsd(epilogue=kl.Bias()), "needs bias"),
    "bias twice": (of_dsd(epilogue=(kl.Bias(), kl.Bias())), "epilogues share the parameter"),
    "bias long": (of_dsd(epilogue=kl.Bias(), bias=ones(96)), r"bias must have shape \(32,\), got"),
    "bias of dds": (
        by(dds, A, V, LAYOUT, epilogue=kl.Bias(), bias=BIAS),
        r"bias must have shape \(96,\), got \(32,\)",
    ),
    "scale nan": (call(SCALED, LAYOUT, A, V, scale=math.nan), "scale must be a number, got nan"),
    "y shape": (
        call(ADDED, LAYOUT, LEFT, K, y=ones(2, 16, 32), beta=1.0),
        r"y must broadcast to \(3, 16, 32\), got \(2, 16, 32\)",
    ),
    "beta missing": (call(ADDED, LAYOUT, LEFT, K, y=Y), "needs beta"),
}
OUTS = {
    "list": ([], "out must be a tensor, got list"),
    "sparse": (sparse(ones(32, 5)), "out must be a dense tensor, .*sparse_coo"),
    "double": (ones(32, 5).double(), "out must be torch.float32 .*got torch.float64"),
    "turned": (ones(5, 32), r"out must have shape \(32, 5\), got \(5, 32\)"),
    "batch": (ones(1, 32, 5), r"out must have shape \(32, 5\), got \(1, 32, 5\)"),
    "device": (meta(ones(32, 5)), "out must be on the device of .*cpu, got meta"),
    "expanded": (ones(1, 5).expand(32, 5), r"out overlaps itself.*\(0, 1\)"),
    "negated": ((ones(32, 5) * 1j).conj().imag, "out is a negated view"),
    "zero": (torch._efficientzerotensor((32, 5)), r"out is a zero tensor.*pass out\.clone\(\)"),
    "inference": (inference(32, 5), "out was made in inference mode"),
}
ALL = TYPE_ERRORS | {f"value {name}": case for name, case in VALUE_ERRORS.items()}


@pytest.mark.parametrize("case", ALL)
def test_what_is_of_the_wrong_kind_or_does_not_fit_is_said(case):
    run, message = ALL[case]
    with pytest.raises(TypeError if case in TYPE_ERRORS else ValueError, match=message):
        run()


@pytest.mark.parametrize("case", ALL)
def test_a_call_whose_gradient_would_be_recorded_says_the_same(case):
    """By way of the operands that can require a gradient."""
    run, message = ALL[case]
    leaves = V, B, A, K, LEFT
    try:
        for leaf in leaves:
            leaf.requires_grad_()
        with pytest.raises((TypeError, ValueError), match=message):
            run()
    finally:
        for leaf in leaves:
            leaf.requires_grad_(False)


@pytest.mark.parametrize("case", ALL)
def test_and_so_does_a_call_under_autocast(case):
    """But for dtypes: it makes one of two, and leaves float64 and numbers as they are."""
    run, message = ALL[case]
    if case in ("two dtypes", "value b number"):
        message = "values and b must have one dtype, got torch.bfloat16 and"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if case in ("two dtypes of dds", "two dtypes of sdd"):
            assert run().dtype == torch.bfloat16
            return
        with pytest.raises((TypeError, ValueError), match=message):
            run()


def test_a_transpose_that_was_made_before_is_no_other(seed):
    """1 and 0 are equal to True and False, and are found among what was kept for these."""
    dsd(V, B, LAYOUT, transpose_b=False)
    dsd(V, B.mT, LAYOUT, transpose_b=True)
    for value in (0, 1, 0.0, 1.0):
        with pytest.raises(TypeError, match="transpose_b must be a bool"):
            dsd(V, B, LAYOUT, transpose_b=value)


@pytest.mark.parametrize("case", OUTS)
def test_an_out_that_does_not_fit_is_refused(case):
    out, message = OUTS[case]
    with pytest.raises((TypeError, ValueError), match=message):
        dsd(V, B, LAYOUT, out=out)


def test_a_refused_call_writes_nothing():
    out = torch.full((32, 5), 7.0)
    for values, b in ((V[:2], B), (V, B.mT), (V, B.double()), (V, [1.0])):
        with pytest.raises((ValueError, TypeError)):
            dsd(values, b, LAYOUT, out=out)
    with pytest.raises(ValueError, match="bias must have shape"):
        dsd(V, B, LAYOUT, epilogue=kl.Bias(), bias=ones(5), out=out)
    assert (out == 7).all()


def test_out_must_not_share_memory():
    memory = torch.full((4096,), 7.0)
    out = memory[1500:1660].view(32, 5)
    for values, b in ((memory[:1536].view(3, 16, 32), B), (V, memory[1600:2080].view(96, 5))):
        with pytest.raises(ValueError, match="out shares memory with"):
            dsd(values, b, LAYOUT, out=out)
    scaled = BlockSparseMatmul("dsd", epilogue=kl.Scale())
    with pytest.raises(ValueError, match="out shares memory with scale;"):
        kl.run_kernel(scaled, LAYOUT, V, B, scale=out[5, 2], out=out)
    with pytest.raises(ValueError, match="out shares memory with bias;"):
        dsd(V, B, LAYOUT, epilogue=kl.Bias(), bias=memory[1640:1672], out=out)
    added = {"epilogue": kl.Add(), "beta": 1.0}
    with pytest.raises(ValueError, match="out shares memory with y;"):
        dsd(V, B, LAYOUT, y=memory[1505:1665].view(32, 5), out=out, **added)
    assert (memory == 7).all()


@pytest.mark.parametrize("place", range(3))
def test_out_takes_no_result_whose_gradient_is_recorded(place):
    given = [V.clone(), B.clone(), ones(32, 5)]
    given[place].requires_grad_()
    with pytest.raises(RuntimeError, match="out takes no result whose gradient is recorded"):
        dsd(*given[:2], LAYOUT, out=given[2])
    with torch.no_grad():
        assert dsd(*given[:2], LAYOUT, out=given[2]) is given[2]


def test_a_device_without_a_backend_is_named(monkeypatch):
    monkeypatch.setattr(operation, "stand_ins", lambda *_: False)

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu", 0)

    layout = Layout.from_layout(LAYOUT.text, [t.as_subclass(Elsewhere) for t in LAYOUT.tensors])
    with pytest.raises(kl.UnsupportedError, match="xpu:0"):
        dsd(V.as_subclass(Elsewhere), B.as_subclass(Elsewhere), layout)


def test_the_operator_checks_what_eager_calls_check():
    def whole(a, b, text=LAYOUT.text, descriptor=DSD.text, **given):
        rest = {"names": "", "numbers": [], "tensors": [], "debug": False} | given
        return operators.whole.overload(a, b, [*LAYOUT.tensors], text, descriptor, **rest)

    with pytest.raises(ValueError, match="values must hold the layout's blocks"):
        whole(V[:2], B)
    with pytest.raises(ValueError, match=r"b must be \(\.\.\., 96, n\)"):
        whole(V, B.mT)
    with pytest.raises(ValueError, match="needs bias"):
        whole(V, B, descriptor=BIASED.text)
    with pytest.raises(ValueError, match="is not the text of a descriptor"):
        whole(V, B, descriptor="nonsense")
