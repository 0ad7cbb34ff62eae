"""Products of float8 with scales, on the CPU, against the formula; and what makes float8."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse.scaled.functions import quantize, scaled_dds, scaled_dsd
from tests.families.blocksparse.scaled.cases import F8, formula, layout, operands

MASK = [[1, 0, 1], [0, 0, 0], [1, 1, 0]]
FUNCTIONS = {"dsd": scaled_dsd, "dds": scaled_dds}
FLAGS = [(of_a, of_b) for of_a in (False, True) for of_b in (False, True)]
every_mode = pytest.mark.parametrize("mode", FUNCTIONS)


def call(mode: str, made, turned, a, b, scale_a, scale_b, **options):
    given = {"transpose_a": turned[0], "transpose_b": turned[1], **options}
    return FUNCTIONS[mode](a, b, made, scale_a, scale_b, **given)


@every_mode
@pytest.mark.parametrize("block", [16, (16, 32), 128], ids=str)
def test_products(mode, block, seed):
    for heads, batches in ((None, ((), ())), (None, ((2,), (3, 1))), (2, ((3,), ()))):
        made = layout([MASK] * heads if heads else MASK, block)
        for turned in FLAGS:
            given = operands(made, mode, turned, batches)
            for dtype, gate in ((torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
                found = call(mode, made, turned, *given, out_dtype=dtype)
                wanted = formula(made, mode, turned, *given)
                assert found.dtype == dtype and found.shape == wanted.shape
                assert (found.double() - wanted).norm() <= gate * wanted.norm()


@every_mode
def test_one_scale_for_all_columns(mode, seed):
    made = layout(MASK, 16)
    given = operands(made, mode, (False, False))
    given[3 if mode == "dsd" else 2] = torch.tensor(0.25)
    wanted = formula(made, mode, (False, False), *given)
    found = call(mode, made, (False, False), *given).double()
    assert (found - wanted).norm() <= 4e-3 * wanted.norm()


def test_out_is_written_in_place(seed):
    made = layout(MASK, 16)
    a, b, scale_a, scale_b = operands(made, "dds", (False, True))
    out = torch.full((made.shape[0], 5), math.nan, dtype=torch.bfloat16).mT
    options = {"transpose_b": True, "out": out}
    assert scaled_dds(a, b, made, scale_a, scale_b, **options) is out
    assert torch.equal(out, scaled_dds(a, b, made, scale_a, scale_b, transpose_b=True))


def test_gradients_of_scales(seed):
    made = layout(MASK, 16, 0)
    a, b, scale_a, scale_b = operands(made, "dds", (False, True))
    scales = [scale_a.requires_grad_(), scale_b.requires_grad_()]
    y = scaled_dds(a, b, made, *scales, transpose_b=True, out_dtype=torch.float16)
    found = torch.autograd.grad(y.double().sum(), scales)
    leaves = [t.detach().clone().requires_grad_() for t in scales]
    wanted = torch.autograd.grad(formula(made, "dds", (False, True), a, b, *leaves).sum(), leaves)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="out takes no result whose gradient is recorded"):
        scaled_dds(a, b, made, *scales, transpose_b=True, out=y.detach())


def test_compiled_and_fake_calls(seed):
    made = layout(MASK, 16)
    given = operands(made, "dds", (False, True))
    wanted = call("dds", made, (False, True), *given)

    def product(*tensors):
        return call("dds", made, (False, True), *tensors) + 1

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), wanted + 1)
    found = call("dds", made.to("meta"), (False, True), *(t.to("meta") for t in given))
    assert found.is_meta and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("dim", [(-2, -1), -1, 0, (0, 2)], ids=str)
def test_quantize(dim, seed):
    x = torch.randn(3, 4, 5) * 100
    q, scale = quantize(x, dim)
    assert q.dtype == F8 and scale.dtype == torch.float32
    largest = x.abs().amax(dim)
    torch.testing.assert_close(scale, largest / 448)
    wide = x.abs().amax(dim, keepdim=True) / 448
    assert ((q.float() * wide - x).abs() <= x.abs() / 16 + wide * 2**-10).all()


@pytest.mark.parametrize("value", [1.4e-45, 2e-43, 8.8e-43, 9.1e-42, 1e-40, 1.1e-38, 3e-36])
def test_quantize_of_subnormal_numbers(value):
    """Scales have few bits there, and are rounded up."""
    x = torch.full((1, 3, 16), value)
    x[:, 0] = -value / 2
    q, scale = quantize(x, -1)
    found = q.double() * scale.double()[..., None]
    assert (found - x.double()).abs().le(x.double().abs() / 16).all()


def test_quantize_of_zeros_and_what_is_not_finite():
    q, scale = quantize(torch.zeros(2, 3, 3))
    assert torch.equal(scale, torch.ones(2)) and not q.float().any()
    q, scale = quantize(torch.zeros(2, 0), -1)
    assert (q.shape, scale.tolist()) == ((2, 0), [1.0, 1.0])
    _, scale = quantize(torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [1.0, 2.0]]), -1)
    assert scale[0] == math.inf and scale[1].isnan() and scale[2] == 2.0 / 448


def test_events_name_what_torch_computes(capsys, seed):
    made = layout(MASK, 16)
    given = operands(made, "dds", (False, True))
    descriptor = kl.BlockSparseScaledMatmul("dds", transpose_b=True)
    kl.run_kernel(descriptor, made, *given, debug=True)
    assert "blocksparse_scaled on cpu: no kernel, computed by torch" in capsys.readouterr().err
