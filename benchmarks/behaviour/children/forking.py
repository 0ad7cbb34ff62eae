"""What the child of a fork can do with CUDA. Each try has a child of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

SECONDS = 20


def tried(call: Callable[[], object]) -> str:
    """What a call in a forked child answers or raises, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            text = str(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        os.write(writing, text[:200].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"{text} killed by {signal.Signals(os.WTERMSIG(status)).name}".strip()
    return text


def main() -> None:
    import torch
    from cuda.bindings import driver

    import kernlib as kl

    def new() -> object:
        return torch.ones(2, device="cuda").sum().item()

    def fresh(before: Callable[[], object]) -> str:
        """A child that does something first, and its child that makes a tensor."""

        def call() -> str:
            before()
            return f"initialised {torch.cuda.is_initialized()}; the fork: {tried(new)}"

        return tried(call)

    points = torch.randn(8, 2)
    befores: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "torch.cuda.is_available()": torch.cuda.is_available,
        "torch.cuda.device_count()": torch.cuda.device_count,
        "torch.cuda.get_device_name()": torch.cuda.get_device_name,
        "torch.cuda.manual_seed(0)": lambda: torch.cuda.manual_seed(0),
        "torch.manual_seed(0)": lambda: torch.manual_seed(0),
        "torch.Generator('cuda')": lambda: torch.Generator("cuda"),
        "torch.zeros(2).pin_memory()": lambda: torch.zeros(2).pin_memory(),
        "torch.cuda.Stream()": torch.cuda.Stream,
        "cuInit(0) of cuda.bindings": lambda: driver.cuInit(0),
        "kernlib.cdist of CPU tensors": lambda: kl.cdist(points, points),
        "kernlib.compile for sm_90a": lambda: kl.compile(
            kl.gaussian(), archs=("sm_90a",), specs=(points.to("meta"),) * 2, bandwidth=8.0
        ),
    }
    for name, before in befores.items():
        print(json.dumps(["before", name, fresh(before)]), flush=True)

    x = torch.ones(8, 2, device="cuda")
    kl.cdist(x, x)
    torch.cuda.synchronize()
    calls: dict[str, Callable[[], object]] = {
        "torch.ones(2, device='cuda')": new,
        "x.shape of a tensor from before": lambda: tuple(x.shape),
        "x.cpu()": lambda: x.cpu().sum().item(),
        "x.sum()": lambda: x.sum().item(),
        "x.sum(), not waited for": lambda: x.sum().shape,
        "torch.empty_like(x)": lambda: torch.empty_like(x).shape,
        "print(x)": lambda: repr(x)[:40],
        "torch.cuda.synchronize()": torch.cuda.synchronize,
        "torch.cuda.is_available()": torch.cuda.is_available,
        "torch.cuda.is_initialized()": torch.cuda.is_initialized,
        "torch.cuda.mem_get_info()": torch.cuda.mem_get_info,
        "torch.cuda.memory_allocated()": torch.cuda.memory_allocated,
        "cuCtxGetCurrent of cuda.bindings": lambda: driver.cuCtxGetCurrent()[0].name,
        "cuMemGetInfo of cuda.bindings": lambda: driver.cuMemGetInfo()[0].name,
        "kernlib.cdist(x, x), called before": lambda: kl.cdist(x, x).sum().item(),
        "kernlib.cdist(x, x), not waited for": lambda: kl.cdist(x, x).shape,
        "kernlib.run_kernel(gaussian, x), new": lambda: (
            kl.run_kernel(kl.gaussian(), x, x, bandwidth=8.0).shape
        ),
        "kernlib.cdist of CPU tensors": lambda: kl.cdist(points, points).shape,
    }
    for name, call in calls.items():
        print(json.dumps(["after", name, tried(call)]), flush=True)
    print(json.dumps(["parent", "x.sum() in the parent, afterwards", str(x.sum().item())]))


if __name__ == "__main__":
    main()
