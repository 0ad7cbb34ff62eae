"""A thread without a CUDA context is given one inside a guard of torch's current device: bound
outside of it, torch would take the context's GPU for the current one from then on."""

import threading

import pytest
import torch

import kernlib as kl
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import devices, driver
from tests.support import fakes
from tests.support.fakes import OnSecondGpu, on_gpu


@pytest.fixture
def bound(monkeypatch):
    """Each device that a context was bound for, with the current one of that moment."""
    gpus = fakes.install(monkeypatch)
    fakes.forget()
    found = []
    monkeypatch.setattr(
        driver, "bind_context", lambda device: found.append((device, gpus.entered[-1]))
    )
    yield found
    fakes.forget()


def in_a_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def calls():
    """A call of every family of kernels that the fakes launch, on the second GPU."""
    a, b = (on_gpu(rows, 12, kind=OnSecondGpu) for rows in (70, 60))
    x, weight = on_gpu(5, 24, kind=OnSecondGpu), on_gpu(2, 3, 4, 3, kind=OnSecondGpu)
    yield lambda: kl.prepare(kl.laplace_l1(), a, b, bandwidth=2.0)
    yield lambda: kl.prepare(kl.KroneckerSparse(2, 3, 4, 3), x, weight)


def test_contexts_are_bound_with_their_device_current(bound):
    for call in calls():
        for _ in range(2):  # that loads its kernels, and that finds them loaded
            bound.clear()
            in_a_thread(call)
            assert bound and set(bound) == {(1, 1)}


def test_a_loaded_kernel_is_handed_out_with_its_context(bound):
    """Whoever loads: codecs of matrices have no plans."""
    spec = KernelSpec("sparse", "", "decode", 32, description="decode")
    assert devices.load(spec, 1) is devices.load(spec, 1)
    assert bound == [(1, 1), (1, 1)]
    assert torch.cuda.current_device() == 0
