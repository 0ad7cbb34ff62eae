"""What a user waits for: the first use of an operation in a fresh process, every import counted.

Nothing here imports kernlib before the clock runs; CUDA is up, tensors are there and a product of
torch has run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

KINDS = ("empty", "filled")  # caches, in the order of the processes that meet them
MUSTS = {"empty": 1000.0, "filled": 100.0}  # of what is torch's own first call no part
POINTS, OTHERS, FEATURES = 2000, 3000, 64
LANDMARKS = 90  # of the preconditioner of so many points


def _points(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(n, FEATURES, device="cuda") for n in (POINTS, OTHERS))
    return a.requires_grad_(requires_grad), b


def _cdist(kl, a, b):
    return kl.cdist(a, b)


def _cdist_step(kl, a, b):
    kl.cdist(a, b).sum().backward()
    return a.grad


def _matmul_inputs(requires_grad: bool = False):
    return *_points(requires_grad), torch.randn(OTHERS, 2, device="cuda")


def _matmul(kl, a, b, v):
    return kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=8.0)


def _matmul_step(kl, a, b, v):
    _matmul(kl, a, b, v).sum().backward()
    return a.grad


def _system():
    return _points()[0], torch.randn(POINTS, 1, device="cuda")


def _solve(kl, a, y):
    return kl.linalg.solve_kernel(kl.gaussian(), a, y, bandwidth=8.0, regularization=1.0).x


def _layer_input():
    return (torch.randn(256, 1024, device="cuda"),)


def _layer(kl, x):
    torch.manual_seed(0)
    return kl.nn.KSLinear([(16, 64, 64, 1), (1, 64, 64, 16)], device="cuda")(x)


def _train_step(kl, x):
    y = _layer(kl, x)
    y.square().mean().backward()
    return y


def _weights():
    kept = torch.rand(1024, 1024, device="cuda") < 0.3
    dense = torch.randn(1024, 1024, device="cuda") * kept
    return dense.half(), torch.randn(1024, device="cuda").half()


def _product(kl, dense, x):
    return kl.sparse.matmul(kl.sparse.compress(dense), x)


def _factors():
    factors = [torch.randn(16, 16, device="cuda") for _ in range(3)]
    return torch.randn(256, 4096, device="cuda"), factors


def _kron_matmul(kl, x, factors):
    return kl.kron_matmul(x, factors)


def _half_input():
    return (torch.randn(256, 1024, device="cuda").half(),)


def _block_sparse_step(kl, x):
    torch.manual_seed(0)
    layer = kl.nn.BlockSparseLinear(1024, 1024, 64, dtype=x.dtype, density=0.25, device="cuda")
    y = layer(x)
    y.float().square().mean().backward()
    return y


def _heads(requires_grad: bool = False):
    tensors = torch.randn(3, 2, 8, 2048, 128, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(16, 16) < 0.3
    return *(t.requires_grad_(requires_grad) for t in tensors.unbind()), mask.cuda()


def _attention(kl, q, k, v, mask):
    return kl.blocksparse.attention(q, k, v, kl.blocksparse.Layout(mask, 128))


def _attention_step(kl, q, k, v, mask):
    _attention(kl, q, k, v, mask).sum().backward()
    return q.grad


# Name to what makes the tensors, and what is timed of kernlib and these.
OPERATIONS: dict[str, tuple[Callable, Callable]] = {
    "cdist p=2": (_points, _cdist),
    "cdist p=2 backward": (lambda: _points(True), _cdist_step),
    "kernel_matmul": (_matmul_inputs, _matmul),
    "kernel_matmul backward": (lambda: _matmul_inputs(True), _matmul_step),
    "solve_kernel": (_system, _solve),
    "KSLinear": (_layer_input, _layer),
    "KSLinear train step": (_layer_input, _train_step),
    "sparse": (_weights, _product),
    "kron_matmul": (_factors, _kron_matmul),
    "BlockSparseLinear train step": (_half_input, _block_sparse_step),
    "attention": (_heads, _attention),
    "attention backward": (lambda: _heads(True), _attention_step),
}


# Whose first use is also the first call of torch.linalg.cholesky, which loads cuSOLVER.
WITH_CHOLESKY = ("solve_kernel",)


def use(name: str) -> None:
    """Print, as JSON, the milliseconds from the import of kernlib to a synchronised result."""
    make, run = OPERATIONS[name]

    def call(*tensors):
        import kernlib as kl

        return run(kl, *tensors)

    _print_first(make, call)


def use_cholesky() -> None:
    """The same of ``torch.linalg.cholesky``, without kernlib."""
    _print_first(lambda: (torch.eye(LANDMARKS, device="cuda"),), torch.linalg.cholesky)


def _print_first(make: Callable, call: Callable) -> None:
    tensors = make()
    torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call(*tensors)
    torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    assert torch.isfinite(result).all()
    print(json.dumps({"ms": milliseconds}))
