"""Many threads, each on a stream of its own, calling all families while plans are dropped."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import kernlib as kl
from kernlib.runtime.plan import forget_plans

THREADS, CALLS = 16, 120


def calls() -> list:
    """Functions of one number, and what each gives for 1, to which results are proportional."""
    a, b = torch.randn(70, 33, device="cuda"), torch.randn(50, 33, device="cuda")
    x, factor = torch.randn(9, 96, device="cuda"), kl.KroneckerSparse(2, 12, 12, 4)
    weight = torch.randn(factor.weight_shape, device="cuda")
    w = kl.sparse.compress(torch.randn(64, 256, device="cuda").half(), "bitmap")
    y, v = torch.randn(256, device="cuda").half(), torch.randn(50, 2, device="cuda")
    made = [
        lambda n: kl.cdist(a * n, b * n, p=1.0),
        lambda n: kl.kernel_matmul(kl.gaussian(), a, b, v * n, bandwidth=6.0),
        lambda n: kl.run_kernel(factor, x * n, weight),
        lambda n: kl.sparse.matmul(w, y * n),
    ]
    return [(call, call(1.0)) for call in made]


def test_threads_on_streams_of_their_own_get_what_one_gets(seed):
    known = calls()
    torch.cuda.synchronize()
    ended = threading.Event()

    def forget() -> None:
        while not ended.wait(0.002):
            forget_plans()

    def work(number: int) -> None:
        choose, stream = random.Random(seed + number), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(CALLS):
                call, wanted = choose.choice(known)
                scale = choose.choice((1.0, 2.0, 4.0))
                assert torch.equal(call(scale), wanted * scale)

    other = threading.Thread(target=forget)
    other.start()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))
    finally:
        ended.set()
        other.join()
