"""Calls on the second GPU leave torch's current device alone, also in a thread that has no context
of its own yet. Each family, loaded by the call and loaded before."""

from __future__ import annotations

import threading

import pytest
import torch

import kernlib as kl
from kernlib import linalg, sparse
from tests.families.sparse.cases import FORMATS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

OTHER = "cuda:1"


def randn(*shape: int, **options) -> torch.Tensor:
    return torch.randn(*shape, device=OTHER, **options)


def points() -> tuple:
    return randn(70, 12), randn(60, 12)


def pairwise():
    a, b = points()
    return lambda: kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=2.0)


def by_tensor_cores():
    a, b = randn(2000, 256), randn(2000, 256)
    return lambda: kl.cdist(a, b)


def feature_map():
    (a, b), weights = points(), randn(12)
    return lambda: kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0, feature_map=weights)


def recorded():
    a, b = points()
    a.requires_grad_()
    return lambda: torch.autograd.grad(kl.cdist(a, b, p=1.5).sum(), a)


def pair_gradient():
    a, b, c, d = randn(60, 70), randn(12, 60), randn(2, 60), randn(12, 70)
    return lambda: kl.cdist_grad(a, b, c, d, p=1.5)


def product():
    (a, b), v = points(), randn(60, 2)
    return lambda: kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=2.0)


def nearest():
    a, b = points()
    return lambda: (kl.kernel_min(kl.l1_distance(), a, b), kl.kernel_topk(kl.l1_distance(), a, b))


def outer_product():
    (a, b), c = points(), randn(2, 60)
    return lambda: kl.agop(kl.gaussian(), a, b, c, bandwidth=2.0)


def factor():
    factor = kl.KroneckerSparse(6, 64, 64, 1)
    x, weight = randn(32, 384).half(), randn(6, 64, 64, 1).half()
    return lambda: kl.run_kernel(factor, x, weight)


def recorded_factor():
    factor = kl.KroneckerSparse(6, 64, 64, 1)
    x = randn(32, 384).half().requires_grad_()
    weight = randn(6, 64, 64, 1).half().requires_grad_()
    return lambda: torch.autograd.grad(kl.run_kernel(factor, x, weight).sum(), (x, weight))


def layer():
    made = kl.nn.KSLinear([(2, 4, 4, 3), (1, 8, 8, 3)], device=OTHER)
    x = randn(5, 24)
    return lambda: made(x).sum().backward()


def matrix(format: str) -> tuple:
    dense = randn(256, 512).half()
    dense[torch.rand(256, 512, device=OTHER) < 0.5] = 0
    return dense, sparse.compress(dense, format)


def product_of(format: str):
    def make():
        _, w = matrix(format)
        x = randn(3, 512).half()
        return lambda: sparse.matmul(w, x)

    return make


def codec_of(format: str):
    def make():
        dense, w = matrix(format)
        return lambda: (sparse.compress(dense, format), w.to_dense())

    return make


def recorded_product():
    _, w = matrix("bitmap")
    x = randn(3, 512).half().requires_grad_()
    return lambda: torch.autograd.grad(sparse.matmul(w, x).sum(), x)


def dense_solver():
    a, b = randn(40, 40), randn(40, 2)
    return lambda: (linalg.solve_lu(a, b), linalg.eigh(a + a.mT))


def kernel_system():
    x, y = randn(200, 3), randn(200)
    return lambda: linalg.solve_kernel(kl.gaussian(), x, y, regularization=0.1, bandwidth=1.0)


def prepared():
    a, b = points()
    return lambda: kl.prepare(kl.matern32(), a, b, bandwidth=2.0)


def tuned():
    a, b = points()
    return lambda: kl.tune(kl.l1_distance(), a, b, progress=False)


CALLS = {
    made.__name__: made
    for made in (
        pairwise, by_tensor_cores, feature_map, recorded, pair_gradient, product, nearest,
        outer_product, factor, recorded_factor, layer, recorded_product, dense_solver,
        kernel_system, prepared, tuned,
    )
}  # fmt: skip
CALLS |= {f"product {name}": product_of(name) for name in FORMATS}
CALLS |= {f"codec {name}": codec_of(name) for name in FORMATS}


def in_a_fresh_thread(call) -> None:
    """Raises what the call raises there, and AssertionError where another device is current."""
    failures, devices = [], []

    def body() -> None:
        try:
            call()
            devices.append(torch.cuda.current_device())
        except BaseException as error:  # a thread would drop it
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    assert devices == [0]


@pytest.mark.parametrize("name", CALLS)
def test_a_fresh_thread_keeps_its_current_device(name, seed):
    with torch.cuda.device(1):
        call = CALLS[name]()
    assert torch.cuda.current_device() == 0
    in_a_fresh_thread(call)  # which loads
    in_a_fresh_thread(call)  # what is loaded
    call()
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
