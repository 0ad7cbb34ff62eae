"""Attention as it is called on a GPU, from the function to the last store and back by its
gradients: the kernels that are chosen, run by threads of the host on what plans give them."""

from __future__ import annotations

import pytest
import torch

from kernlib.families.blocksparse.attention import plans
from kernlib.families.blocksparse.attention.functions import attention
from tests.families.blocksparse.attention.cases import BF16, F16, F32, Shape, check, formula
from tests.families.blocksparse.attention.on_host import on_gpu
from tests.families.blocksparse.attention.options import option
from tests.support import fakes
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.speeds import slow_but

pytestmark = pytest.mark.emulated
PADDED = Shape(2, 4, 2, 50, 70, 24, 21, (16, 32))
WHOLE = Shape(1, 2, 1, 64, 64, 16, 16, (32, 32))
OPTIONS = (
    "plain", "lengths", "causal window", "dropout", "bias", "a bias that broadcasts", "slopes",
    "gain and cap", "documents", "a mask of bools", "where", "score and mask",
)  # fmt: skip
GATES = {F16: 2e-2, BF16: 1e-1}


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    """GPUs whose kernels are run by threads of the host."""
    fakes.forget()
    monkeypatch.setenv("KERNLIB_PORTABLE", "1")
    yield emulated.install(monkeypatch, kernels_of(tmp_path_factory), plans)
    fakes.forget()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", slow_but(("score and mask",), OPTIONS))
@pytest.mark.parametrize("shape, dtype", [(PADDED, F16), (WHOLE, BF16)], ids=["padded", "whole"])
def test_values_and_gradients(name, shape, dtype, gpus, seed):
    given = option(name, shape, F32)
    for heads in (None, shape.batch * shape.heads):
        made, tensors = shape.layout(heads), shape.tensors(dtype)
        reads = given.text.get("score") is not None
        floats = {n: t for n, t in given.captured.items() if reads and t.is_floating_point()}
        wide = [t.double().requires_grad_() for t in tensors]
        own = {n: t.double().requires_grad_() for n, t in floats.items()}
        functions = {n: make(given.captured | own) for n, make in given.functions.items()}
        wanted = formula(*wide, made, **given.both, **functions)

        leaves = [on_gpu(t).requires_grad_() for t in tensors]
        captured = {n: on_gpu(t.clone()).requires_grad_() for n, t in floats.items()}
        rest = {n: on_gpu(t) if isinstance(t, torch.Tensor) and t.dim() else t
                for n, t in given.call.items()} | captured  # fmt: skip
        found = attention(*leaves, on_gpu(made), return_lse=True, **rest)
        for ours, theirs in zip(found, wanted, strict=True):
            check(ours.detach().as_subclass(torch.Tensor), theirs.detach(), GATES[dtype])

        alone = wanted[1] == -torch.inf
        grads = torch.randn_like(wanted[0]), torch.where(alone, 0.0, torch.randn_like(wanted[1]))
        results = wanted[0], torch.where(alone, 0.0, wanted[1])
        theirs = torch.autograd.grad(results, (*wide, *own.values()), grads)
        arrived = on_gpu(grads[0].to(dtype)), on_gpu(grads[1].float())
        ours = torch.autograd.grad(found, (*leaves, *captured.values()), arrived)
        for t, other in zip(ours, theirs, strict=True):
            check(t.as_subclass(torch.Tensor), other, GATES[dtype])
    assert any("gradient" in spec.description for spec in gpus.specs)
