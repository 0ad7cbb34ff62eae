"""Calls on the second GPU leave torch's current device alone, also in a thread that has no context
of its own yet. Each family, loaded by the call and loaded before."""

from __future__ import annotations

import threading

import pytest
import torch

import kernlib as kl
from kernlib import linalg, sparse
from tests.families.sparse.cases import FORMATS
from tests.gpu.shared import test_hot_paths as hot_paths

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

OTHER = "cuda:1"


def randn(*shape: int, **options) -> torch.Tensor:
    return torch.randn(*shape, device=OTHER, **options)


def points() -> tuple:
    return randn(70, 12), randn(60, 12)


def feature_map():
    (a, b), weights = points(), randn(12)
    return lambda: kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0, feature_map=weights)


def pair_gradient():
    a, b, c, d = randn(60, 70), randn(12, 60), randn(2, 60), randn(12, 70)
    return lambda: kl.cdist_grad(a, b, c, d, p=1.5)


def outer_product():
    (a, b), c = points(), randn(2, 60)
    return lambda: kl.agop(kl.gaussian(), a, b, c, bandwidth=2.0)


def factor():
    """By tensor cores."""
    factor = kl.KroneckerSparse(6, 64, 64, 1)
    x, weight = randn(32, 384).half(), randn(6, 64, 64, 1).half()
    return lambda: kl.run_kernel(factor, x, weight)


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


def prepared():
    a, b = points()
    return lambda: kl.prepare(kl.matern32(), a, b, bandwidth=2.0)


def tuned():
    a, b = points()
    return lambda: kl.tune(kl.l1_distance(), a, b, progress=False)


def hot_path(name: str):
    """A call of an operation, and its gradients."""

    def make():
        run, shapes = hot_paths.CALLS[name]
        tensors = [randn(*shape).requires_grad_() for shape in shapes]

        def call() -> None:
            result = run(*tensors)
            if result.requires_grad:
                torch.autograd.grad(result.sum(), tensors, allow_unused=True)

        return call

    return make


CALLS = {name: hot_path(name) for name in hot_paths.CALLS}
CALLS |= {
    made.__name__: made
    for made in (
        feature_map, pair_gradient, outer_product, factor, recorded_product, dense_solver,
        prepared, tuned,
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
