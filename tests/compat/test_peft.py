"""BOFT layers of peft by kernlib, beside peft's own on CPU tensors."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from kernlib.compat import peft as fast
from kernlib.errors import KernlibWarning

FEATURES, OUT = 48, 40
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-6, torch.bfloat16: 3e-2}


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


class BlockDiagonal(torch.autograd.Function):
    """In place of peft's CUDA extension, without which it has one factor alone."""

    @staticmethod
    def apply(blocks):
        return torch.stack([torch.block_diag(*factor) for factor in blocks])


@pytest.fixture
def butterflies(peft, monkeypatch):
    """peft with several factors."""
    from peft.tuners.boft import layer

    monkeypatch.setattr(layer, "get_fbd_cuda", lambda: True)
    monkeypatch.setattr(layer, "FastBlockDiag", BlockDiagonal)


def base(bias: bool = True, dtype=torch.float32) -> nn.Module:
    layers = nn.Linear(FEATURES, OUT, bias), nn.Tanh(), nn.Linear(OUT, FEATURES)
    return nn.Sequential(*layers).to(dtype)


def pair(peft, model: nn.Module | None = None, **options):
    """A model with adapters that are no identity by peft and, accelerated, by kernlib."""
    options = {"boft_block_size": 4, "target_modules": ["0"], "init_weights": False} | options
    slow = peft.get_peft_model(base() if model is None else model, peft.BOFTConfig(**options))
    quick = copy.deepcopy(slow)
    layers = fast.accelerate(quick)
    assert layers and all(type(one).__name__ == "BOFTLinear" for one in layers.values())
    return slow, quick


def same(slow: nn.Module, quick: nn.Module, x: torch.Tensor) -> None:
    """Results and all gradients."""
    tolerance = TOLERANCES[x.dtype]
    grads, results = [], []
    for model in (slow, quick):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        assert y.dtype == x.dtype
        results.append(y.detach())
        trained = [p for p in model.parameters() if p.requires_grad]
        grads.append(torch.autograd.grad(y.float().square().sum(), [leaf, *trained]))
    for got, wanted in ((results[1], results[0]), *zip(grads[1], grads[0], strict=True)):
        scale = wanted.abs().max().item() or 1.0
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("size", (2, 4, 6, 48))
def test_blocks_of_one_factor(peft, bias, size, seed):
    slow, quick = pair(peft, base(bias), boft_block_size=size)
    for shape in ((5,), (2, 3), ()):
        same(slow, quick, torch.randn(*shape, FEATURES))


@pytest.mark.parametrize(("size", "factors"), [(2, 2), (4, 3), (6, 4), (12, 3)])
def test_butterflies_of_several_factors(peft, butterflies, size, factors, seed):
    slow, quick = pair(peft, boft_block_size=size, boft_n_butterfly_factor=factors)
    layer = next(m for m in quick.modules() if type(m).__name__ == "BOFTLinear")
    assert layer.boft_R["default"].shape[0] == factors
    same(slow, quick, torch.randn(7, FEATURES))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_dtypes(peft, dtype, seed):
    slow, quick = pair(peft, base(dtype=dtype), boft_block_size=8)
    same(slow, quick, torch.randn(9, FEATURES, dtype=dtype))


def test_several_adapters_at_a_time(peft, butterflies, seed):
    options = {"target_modules": ["0"], "init_weights": False, "boft_n_butterfly_factor": 2}
    slow = peft.get_peft_model(base(), peft.BOFTConfig(boft_block_size=4, **options))
    slow.add_adapter("second", peft.BOFTConfig(boft_block_size=4, **options))
    slow.base_model.set_adapter(["default", "second"])
    quick = copy.deepcopy(slow)
    fast.accelerate(quick)
    same(slow, quick, torch.randn(3, FEATURES))


def test_dropout_replaces_the_same_blocks(peft, butterflies, seed):
    slow, quick = pair(peft, boft_dropout=0.5, boft_n_butterfly_factor=2)
    x, results = torch.randn(3, FEATURES), []
    for model in (slow.train(), quick.train()):
        torch.manual_seed(5)
        results.append(model(x))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(results[1], quick.eval()(x), atol=1e-3)


def test_merged_and_disabled_layers(peft, seed):
    slow, quick = pair(peft)
    x = torch.randn(3, FEATURES)
    adapted = quick(x)
    with quick.disable_adapter():
        plain = quick(x)
    assert not torch.allclose(plain, adapted, atol=1e-3)
    with slow.disable_adapter():
        torch.testing.assert_close(plain, slow(x))
    quick.merge_adapter()
    torch.testing.assert_close(quick(x), adapted, rtol=1e-4, atol=1e-5)
    quick.unmerge_adapter()
    torch.testing.assert_close(quick(x), adapted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(quick.merge_and_unload()(x), adapted, rtol=1e-4, atol=1e-4)


def test_adapters_are_saved_as_those_of_peft(peft, tmp_path, seed):
    slow, quick = pair(peft)
    assert quick.state_dict().keys() == slow.state_dict().keys()
    quick.save_pretrained(tmp_path)
    plain = base()
    plain[0].load_state_dict(quick.get_base_model()[0].base_layer.state_dict())
    plain[2].load_state_dict(quick.get_base_model()[2].state_dict())
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    x = torch.randn(3, FEATURES)
    torch.testing.assert_close(loaded(x), quick(x), rtol=1e-4, atol=1e-5)


def test_copies_and_pickles_stay_accelerated(peft, seed):
    _, quick = pair(peft)
    x = torch.randn(3, FEATURES)
    for copied in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        assert torch.equal(copied(x), quick(x))
        assert len(fast.restore(copied)) == 1


def test_restored_layers_are_those_of_peft(peft, seed):
    slow, quick = pair(peft)
    assert list(fast.restore(quick)) and not fast.restore(quick)
    assert [type(m) for m in quick.modules()] == [type(m) for m in slow.modules()]
    x = torch.randn(3, FEATURES)
    assert torch.equal(quick(x), slow(x))


def test_layers_with_hooks_see_their_calls(peft, seed):
    slow, quick = pair(peft)
    seen = []
    for model in (slow, quick):
        model.get_base_model()[0].base_layer.register_forward_hook(lambda *a: seen.append(a[2]))
    same(slow, quick, torch.randn(3, FEATURES))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


def test_layers_whose_forward_is_replaced_call_it(peft, seed):
    slow, quick = pair(peft)
    for model in (slow, quick):
        layer = model.get_base_model()[0].base_layer
        layer.forward = lambda x, layer=layer: 2 * nn.Linear.forward(layer, x)
    same(slow, quick, torch.randn(3, FEATURES))


def test_hooks_of_devices_call_accelerated_layers(peft, monkeypatch, seed):
    """Those of ``device_map`` replace a layer's forward, and call the one before."""
    hooks = pytest.importorskip("accelerate.hooks")
    calls, run = [], fast.run_kernel
    monkeypatch.setattr(fast, "run_kernel", lambda *call: calls.append(call) or run(*call))
    slow, _ = pair(peft)
    model, x = copy.deepcopy(slow), torch.randn(3, FEATURES)
    hooks.add_hook_to_module(model.get_base_model()[0], hooks.AlignDevicesHook("cpu"))
    fast.accelerate(model)
    torch.testing.assert_close(model(x), slow(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    fast.restore(model)
    assert torch.equal(model(x), slow(x)) and len(calls) == 1


def test_under_autocast(peft, seed):
    slow, quick = pair(peft)
    x = torch.randn(6, FEATURES)
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = quick(x), slow(x)
    torch.testing.assert_close(got, wanted, rtol=3e-2, atol=5e-2)


def test_what_is_not_taken_is_said(peft):
    with pytest.warns(KernlibWarning, match="takes no layer: Sequential has no BOFT layer"):
        assert fast.accelerate(base()) == {}
    convolution = nn.Sequential(nn.Conv2d(4, 4, 3))
    config = peft.BOFTConfig(boft_block_size=4, target_modules=["0"])
    with pytest.warns(KernlibWarning, match="leaves BOFT layers of convolutions to peft"):
        assert fast.accelerate(peft.get_peft_model(convolution, config)) == {}
    with pytest.raises(TypeError, match=r"model must be an nn\.Module"):
        fast.accelerate(3)


def test_without_peft_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "peft.tuners.boft.layer", None)
    with pytest.raises(ImportError):
        fast.accelerate(base())
