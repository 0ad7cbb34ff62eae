"""What a fresh process pays until torch and kernlib compute: seconds, and memory of the device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

BEGIN = time.perf_counter()


def main() -> None:
    import torch

    def stage(name: str, call: Callable[[], object]) -> object:
        before = torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else None
        begin = time.perf_counter()
        value = call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        after = torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else None
        used = (before - after) >> 20 if before is not None else None
        print(json.dumps([name, seconds, used, after]), flush=True)
        return value

    print(json.dumps(["import torch", time.perf_counter() - BEGIN, None, None]), flush=True)
    stage("torch.cuda.is_available()", torch.cuda.is_available)
    stage("torch.cuda.init()", torch.cuda.init)
    x = stage("first tensor: torch.zeros(512, 512)", lambda: torch.zeros(512, 512, device="cuda"))
    stage("first kernel: x + 1", lambda: x + 1)
    stage("another kernel of that file: x * 2", lambda: x * 2)
    stage("first random numbers", lambda: torch.randn(512, 512, device="cuda"))
    stage("first product, float32", lambda: x @ x)
    half = stage("first cast, to bfloat16", x.bfloat16)
    stage("first product, bfloat16", lambda: half @ half)
    stage("the same once more", lambda: half @ half)
    stage("first sum", x.sum)
    stage("first sort", x.sort)
    stage("first solve", lambda: torch.linalg.solve(x + torch.eye(512, device="cuda"), x))
    stage("first SDPA", lambda: sdpa(torch, half))
    kl = stage("import kernlib", lambda: __import__("kernlib"))
    stage("first call of kernlib: cdist", lambda: kl.cdist(x, x))
    stage("the same once more", lambda: kl.cdist(x, x))
    stage("another kernel of kernlib", lambda: kl.run_kernel(kl.gaussian(), x, x, bandwidth=8.0))


def sdpa(torch, half):
    q = half.view(1, 4, 512, 128)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


if __name__ == "__main__":
    main()
