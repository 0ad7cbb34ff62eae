"""What GPUs and other libraries do otherwise than a CPU or than their names say, where a call of
kernlib would show it: here on the CPU, by the calls that are made; tests/gpu has the values."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernlib as kl
from kernlib import blocksparse, sparse

NEGATIVE_NAN = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)


class Watched(TorchDispatchMode):
    """Has ``look(operator, arguments)`` see each operator of torch."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.look(function.overloadpacket, args)
        return function(*args, **(kwargs or {}))


@contextmanager
def watched(*operators):
    """The arguments of each call of one of the operators."""
    calls = []
    with Watched(lambda operator, args: operator in operators and calls.append(args)):
        yield calls


WEIGHT = torch.linspace(-3, 5, 16 * 256).view(16, 256)
QUANTISERS = {
    "quantize": lambda: blocksparse.quantize(WEIGHT, -1),
    **{
        f"{values} of {kind}": lambda values=values, weight=weight: sparse.compress(
            weight, "bitmap", values=values
        )
        for values in ("int8", "fp8", "int4")
        for kind, weight in (("a tensor", WEIGHT), ("CSR", WEIGHT.to_sparse_csr()))
    },
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", QUANTISERS)
def test_scales_are_quotients_by_tensors(name):
    """By a number torch multiplies with its reciprocal on GPUs: scales would have other bits."""
    div = torch.ops.aten.div
    with watched(div, torch.ops.aten.div_) as calls:
        QUANTISERS[name]()
    divisors = [args[1] for args in calls if args[0].is_floating_point()]
    assert len(divisors) >= 2  # of scales, and of codes
    assert all(isinstance(divisor, torch.Tensor) for divisor in divisors)


def nearest():
    points = torch.linspace(0, 9, 24).view(12, 2)
    points[3] = torch.nan
    return kl.kernel_topk(kl.Pairwise(epilogue=kl.Custom("-v")), points, points, 8, True)[0]


SORTED = {
    "kernel_topk": nearest,
    "top_k": lambda: blocksparse.top_k(torch.cat((torch.ones(3), NEGATIVE_NAN))[None], 16, 2),
}


@pytest.mark.parametrize("name", SORTED)
def test_a_nan_that_torch_sorts_has_no_sign(name, monkeypatch):
    """On GPUs one with a sign comes first in a long row, and last where it is descending."""
    numbers, sort = [], torch.Tensor.sort

    def watched_sort(t, *args, **kwargs):
        numbers.extend([t.clone()] if t.is_floating_point() else [])
        return sort(t, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", watched_sort)
    found = SORTED[name]()
    assert any(t.isnan().any() for t in numbers)
    assert not any((t.isnan() & t.signbit()).any() for t in numbers)
    if name == "top_k":
        assert found.mask().tolist() == [[True, False, False, True]]
    else:
        assert found[:, 0].isnan().all()
