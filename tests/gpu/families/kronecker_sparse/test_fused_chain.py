"""Chains of two factors as one kernel on the GPU: values against float64, what lies beside them,
graphs, and layers."""

from __future__ import annotations

import copy

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import reference
from tests.gpu.families.kronecker_sparse import cases as ks
from tests.gpu.watched import launches

CHAINS = {
    "384 to 384": ((2, 48, 192, 1), (1, 192, 48, 2)),
    "384 to 1536": ((6, 64, 64, 1), (1, 768, 192, 2)),
    "1536 to 384": ((6, 64, 256, 1), (1, 128, 128, 3)),
    "768 to 768": ((2, 96, 384, 1), (1, 384, 96, 2)),
    "d = 1, two groups": ((4, 32, 24, 1), (2, 136, 64, 1)),
    "d = 4": ((4, 32, 24, 1), (1, 136, 32, 4)),
    "d = 5, columns of no whole tile": ((2, 80, 72, 1), (1, 56, 32, 5)),
    "d = 8": ((4, 32, 24, 1), (1, 136, 16, 8)),
    "1024 to 4096": ((16, 64, 64, 1), (1, 256, 64, 16)),
    "2048 to 4096": ((32, 64, 64, 1), (1, 128, 64, 32)),
    "4096 to 8192": ((64, 64, 64, 1), (1, 128, 64, 64)),
}
EPILOGUES = {
    "none": (),
    "bias": (kl.Bias(),),
    "gelu": (kl.Bias(), kl.Scale(), kl.Gelu(), kl.Bias("late")),
}
HALVES = ("fp16", "bf16")
TOLERANCE = {"fp16": 3e-4, "bf16": 2.4e-3}
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not is_hopper, reason="a kernel of Hopper's")


def descriptor(chain, epilogue=()) -> kl.KroneckerSparseChain:
    first, last = chain
    return kl.KroneckerSparseChain(
        (kl.KroneckerSparse(*first), kl.KroneckerSparse(*last, epilogue=epilogue))
    )


def operands(chain, rows: int, numbers: str, pitch: int = 0) -> list[torch.Tensor]:
    dtype, (a, _, c, _) = ks.DTYPES[numbers], chain[0]
    x = ks.random(rows, a * c + pitch, dtype=dtype)[:, : a * c]
    return [x, *(ks.random(*each, dtype=dtype, scale=each[2] ** -0.5) for each in chain)]


def parameters(chain, epilogue, dtype) -> dict:
    features = chain[1][0] * chain[1][1] * chain[1][3]
    names = [name for part in epilogue for name in part.parameters]
    vectors = [name for part in epilogue for name in part.vectors]
    return {n: ks.random(features, dtype=dtype) if n in vectors else 0.75 for n in names}


def exact(chain, epilogue, x, first, last, values) -> torch.Tensor:
    """In float64, but that the result of the first factor is rounded."""
    h = ks.exact(x, first).to(x.dtype)
    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    return reference.finish(epilogue, ks.exact(h, last), wide, False)


def called(chain, *tensors, **values) -> torch.Tensor:
    """The call, which is one product."""
    with launches() as launched:
        y = kl.run_kernel(chain, *tensors, **values)
    assert [description.split()[1] for description in launched] == ["pack", "chain"]
    return y


@pytest.mark.few(6)
@pytest.mark.parametrize("numbers", HALVES)
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("name", CHAINS)
def test_values(name, epilogue, numbers, seed):
    chain = CHAINS[name]
    for rows, pitch in ((8448, 0), (25089, 8), (12609, 64)):
        tensors = operands(chain, rows, numbers, pitch)
        values = parameters(chain, epilogue, tensors[0].dtype)
        # In memory that is full of NaN, where the allocator gives the same again.
        torch.full((rows, chain[1][1] * chain[1][3] * chain[1][0]), ks.POISON, device=ks.DEVICE,
                   dtype=tensors[0].dtype)  # fmt: skip
        y = called(descriptor(chain, epilogue), *tensors, **values)
        expected = exact(chain, epilogue, *tensors, values)
        assert ks.relative_error(y, expected) < TOLERANCE[numbers]
        assert torch.equal(y, called(descriptor(chain, epilogue), *tensors, **values))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name in CHAINS if CHAINS[name][1][3] in (3, 5)])
@pytest.mark.parametrize("rows", [8448, 25089])
def test_staged_lines_without_vectors_behind_them(name, rows, seed):
    """Threads copy lines of 16 rows, ten or six at a time: the last ones read no more."""
    chain = CHAINS[name]
    tensors = operands(chain, rows, "fp16")
    y = called(descriptor(chain), *tensors)
    assert ks.relative_error(y, exact(chain, (), *tensors, {})) < TOLERANCE["fp16"]


@pytest.mark.parametrize("numbers", HALVES)
def test_weights_of_other_strides(numbers, seed):
    chain = CHAINS["384 to 1536"]
    x, first, last = operands(chain, 25089, numbers)
    apart = torch.empty(6, 64, 128, 1, dtype=x.dtype, device=x.device)[:, :, :64].copy_(first)
    turned = last.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    y = called(descriptor(chain), x, apart, turned)
    assert torch.equal(y, called(descriptor(chain), x, first, last))


def test_infinities_stay_in_their_rows(seed):
    chain = CHAINS["1536 to 384"]
    x, first, last = operands(chain, 25089, "fp16")
    clean = called(descriptor(chain), x, first, last)
    x[7, 3], x[130, 1000], x[25088, 5] = float("inf"), float("nan"), float("-inf")
    y = called(descriptor(chain), x, first, last)
    rows = torch.tensor([7, 130, 25088], device=x.device)
    assert not y[rows].isfinite().all(1).any()
    clean[rows] = y[rows]
    assert torch.equal(y.nan_to_num(), clean.nan_to_num())


def test_a_graph_of_a_prepared_call(seed):
    chain, epilogue = CHAINS["384 to 384"], EPILOGUES["bias"]
    tensors = operands(chain, 25088, "fp16")
    values = parameters(chain, epilogue, tensors[0].dtype)
    kl.prepare(descriptor(chain, epilogue), *tensors, **values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kl.run_kernel(descriptor(chain, epilogue), *tensors, **values)
    for _ in range(2):
        for t in (*tensors, values["bias"]):
            t.copy_(torch.randn_like(t) * 0.25)
        graph.replay()
        assert torch.equal(y, called(descriptor(chain, epilogue), *tensors, **values))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_layer(is_compiled, seed):
    """Eager and compiled, in half precision and under autocast; its gradient is that of factors."""
    options = {"device": ks.DEVICE, "activation": "gelu"}
    layer = kl.nn.KSLinear(CHAINS["384 to 1536"], **options)
    half = copy.deepcopy(layer).half()
    x = ks.random(128, 197, 384)
    call = torch.compile(half) if is_compiled else half
    with torch.no_grad(), launches() as launched:
        y = call(x.half())
    assert any(" chain " in description for description in launched)
    with torch.no_grad():
        expected = torch.nn.functional.gelu(x.double() @ layer.to_dense().double().T + layer.bias)
    assert ks.relative_error(y, expected) < 1e-3
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        assert ks.relative_error(layer(x), expected) < 1e-3
    call(x.half()).float().square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in half.parameters())
