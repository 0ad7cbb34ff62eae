"""Streams, capture, synchronisation, sizes and devices."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import kernlib as kl
from tests.gpu.families.pairwise.cases import points, relative_error
from tests.gpu.watched import capture, nothing_waits, peak


def test_a_call_never_waits_for_the_device(seed):
    a, b = torch.randn(3, 70, 12, device="cuda"), torch.randn(3, 60, 12, device="cuda")
    bandwidth = torch.ones(3, device="cuda")
    with nothing_waits():
        for value in (2.0, bandwidth, bandwidth.double(), torch.ones(3), torch.tensor(2.0)):
            for _ in range(2):
                kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=value)
        kl.cdist(a, b, p=bandwidth * 1.5)


def test_the_current_stream_is_used(seed):
    a, b = points(3000, 400), points(3000, 400)
    wanted = kl.cdist(a, b, p=1)
    stream = torch.cuda.Stream()
    x = torch.empty_like(a)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(a)
        out = kl.cdist(x, b, p=1)
    stream.synchronize()
    assert torch.equal(out, wanted)


def test_capture_needs_prepare_and_replays(seed):
    a, b = points(141, 23), points(77, 23)
    p = torch.tensor(1.5, device="cuda")
    out = torch.empty(141, 77, device="cuda")
    descriptor = kl.p_distance(epilogue=kl.Custom("v * 1.25 + 3"))
    with pytest.raises(kl.CaptureError, match=r"kernlib\.prepare"), capture():
        kl.run_kernel(descriptor, a, b, out=out, p=p)
    torch.cuda.synchronize()
    kl.prepare(descriptor, a, b, out=out, p=p)
    with capture() as graph:
        kl.run_kernel(descriptor, a, b, out=out, p=p)
    for value in (1.5, 2.0, 3.0):
        p.fill_(value)
        out.fill_(math.nan)
        graph.replay()
        wanted = torch.cdist(a.double(), b.double(), p=value) * 1.25 + 3
        assert relative_error(out, wanted.cpu()) <= 5e-6


def test_threads_share_kernels_and_not_parameters(seed):
    a, b = points(200, 40), points(190, 40)
    wanted = {w: kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=w) for w in (5.0, 9.0, 14.0, 20.0)}
    torch.cuda.synchronize()
    failures = []

    def work(width: float) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(300):
                out = kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=width)
            torch.cuda.current_stream().synchronize()
            if not torch.equal(out, wanted[width]):
                failures.append(width)

    threads = [threading.Thread(target=work, args=(width,)) for width in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_fresh_thread_needs_no_context_of_its_own(seed):
    a, b = points(64, 8), points(64, 8)
    out = torch.full((64, 64), math.nan, device="cuda")
    wanted = kl.cdist(a, b, p=1)
    thread = threading.Thread(target=kl.run_kernel, args=(kl.l1_distance(), a, b),
                              kwargs={"out": out})  # fmt: skip
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_a_host_tensor_is_refused_inside_a_capture(seed):
    a, b = points(64, 8), points(64, 8)
    out, bandwidth = torch.empty(64, 64, device="cuda"), torch.tensor([2.0])
    kl.run_kernel(kl.laplace_l1(), a, b, out=out, bandwidth=bandwidth)
    with pytest.raises(kl.CaptureError, match="bandwidth is in host"), capture():
        kl.run_kernel(kl.laplace_l1(), a, b, out=out, bandwidth=bandwidth)


def test_out_none_allocates_one_output(seed):
    a, b = points(1024, 64), points(1024, 64)
    kl.cdist(a, b, p=1)
    out, most = peak(lambda: kl.cdist(a, b, p=1))
    assert most == out.numel() * 4


def sampled(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows, columns) -> float:
    wanted = (a[rows].double()[:, None] - b[columns].double()[None]).abs().sum(-1)
    return relative_error(out[rows][:, columns], wanted)


def test_more_than_2_to_the_31_elements(seed):
    a, b = points(50_000, 8), points(50_001, 8)
    out = torch.full((50_000, 50_001), math.nan, device="cuda")
    kl.run_kernel(kl.l1_distance(), a, b, out=out)
    rows = torch.tensor([0, 1, 127, 128, 42_949, 42_950, 49_999], device="cuda")
    columns = torch.tensor([0, 31, 32, 50_000, 33_333], device="cuda")
    assert sampled(out, a, b, rows, columns) <= 1e-6
    assert not any(part.isnan().any() for part in out.split(4096))


def test_more_points_than_fit_an_axis_of_blocks(seed):
    a, b = points(9_000_000, 1), points(3, 1)
    rows = torch.tensor([0, 8_388_607, 8_388_608, 8_999_999], device="cuda")
    columns = torch.arange(3, device="cuda")
    assert sampled(kl.cdist(a, b, p=1), a, b, rows, columns) <= 1e-6
    across = kl.cdist(b, a, p=1)
    assert torch.equal(across, kl.cdist(a, b, p=1).T)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_decides(seed):
    a, b = points(200, 40), points(190, 40)
    wanted = kl.cdist(a, b, p=1)
    other = torch.device("cuda:1")
    out = kl.cdist(a.to(other), b.to(other), p=1)
    assert out.device == other and torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), wanted)
    with pytest.raises(ValueError, match="one device"):
        kl.cdist(a, b.to(other))
