"""Calls of every operation that promises the same bits each time; for the CPU and for a GPU.

``same_bits`` makes the operands once, calls twice, and twice more under
``torch.use_deterministic_algorithms``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

import kernlib as kl
from kernlib import linalg, sparse
from kernlib.nn import KSLinear
from tests.families.sparse.cases import FORMATS

KERNELS = {
    "l1_distance": {},
    "l2_distance": {},
    "squared_distance": {},
    "p_distance": {"p": 1.3},
    "power_sum": {"p": 3.0},
    "dot_product": {},
    "exp_power_sum": {"p": 1.5, "inner_scale": -0.5},
    "laplace_l1": {"bandwidth": 9.0},
    "laplace_l2": {"bandwidth": 3.0},
    "laplace_pq": {"bandwidth": 3.0, "p": 1.3, "q": 0.8},
    "gaussian": {"bandwidth": 3.0},
    "matern32": {"bandwidth": 3.0},
    "matern52": {"bandwidth": 3.0},
    "rational_quadratic": {"bandwidth": 3.0, "alpha": 1.5},
    "cauchy": {"bandwidth": 3.0},
    "polynomial": {"gamma": 0.1, "offset": 1.0},
}
CUSTOM = kl.l1_distance(epilogue=kl.Custom("gain * exp(-v)", ("gain",)))


def descriptor(name: str) -> kl.Pairwise:
    make = getattr(kl, name)
    return make(3) if name == "polynomial" else make()


class Maker:
    """Operands by a seed on a device, float32."""

    def __init__(self, device: str, rows: int) -> None:
        self.device, self.rows = device, rows
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, recorded: bool = False) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator).to(self.device)
        return made.requires_grad_(recorded)


def _slopes(call: Callable, sides: tuple, twice: bool) -> tuple[torch.Tensor, ...]:
    """A result, its gradients, and with ``twice`` those of these."""
    y = call(*sides)
    first = torch.autograd.grad(y.square().sum(), sides, create_graph=twice)
    if not twice:
        return (y.detach(), *first)
    second = torch.autograd.grad(sum(f.square().sum() for f in first), sides)
    return (y.detach(), *(f.detach() for f in first), *second)


def pairwise(make: Maker) -> Iterator[tuple[str, Callable]]:
    a, b = make(make.rows, 19, recorded=True), make(make.rows + 9, 19, recorded=True)
    v = make(make.rows + 9, 3)
    for name, numbers in KERNELS.items():
        run = partial(kl.run_kernel, descriptor(name), **numbers)
        twice = make.device != "cpu" or name in ("laplace_pq", "gaussian")
        yield name, partial(_slopes, run, (a, b), twice)
    yield "Custom", partial(_slopes, partial(kl.run_kernel, CUSTOM, gain=2.0), (a, b), True)
    for p in (0.5, 1.0, 2.0, 2.5):
        yield f"cdist {p}", partial(_slopes, partial(kl.cdist, p=p), (a, b), p == 2)
    yield "cdist_expadd", partial(_slopes, partial(kl.cdist_expadd, lengthscale=2.0), (a, b), True)
    x, z = a.detach(), b.detach()
    weights, c = make(len(z), len(x)), make(3, len(z))
    for p in (1.0, 1.5, 2.0):
        call = partial(kl.cdist_grad, weights, z.mT, c, x.mT, p=p)
        yield f"cdist_grad {p}", lambda call=call: (call(),)
    yield (
        "cdist_grad_expadd",
        lambda: (kl.cdist_grad_expadd(weights, z.mT, c, x.mT, lengthscale=2.0, q=0.5, c0=1.0),),
    )
    for diagonal in (False, True):
        agop = partial(kl.agop, kl.laplace_l2(), x, z, c, diagonal=diagonal, bandwidth=3.0)
        yield f"agop {diagonal}", lambda agop=agop: (agop(),)
    g = kl.gaussian()
    reductions = {
        "kernel_matmul": lambda a, b: kl.kernel_matmul(g, a, b, v, bandwidth=3.0),
        "kernel_sum": lambda a, b: kl.kernel_sum(g, a, b, bandwidth=3.0),
        "kernel_logsumexp": lambda a, b: kl.kernel_logsumexp(g, a, b, bandwidth=3.0),
        "kernel_min": lambda a, b: kl.kernel_min(kl.squared_distance(), a, b)[0],
        "kernel_topk": lambda a, b: kl.kernel_topk(kl.squared_distance(), a, b, 5)[0],
    }
    for name, call in reductions.items():
        yield name, partial(_slopes, call, (a, b), False)
    yield "kernel_argmin", lambda: (kl.kernel_argmin(kl.l1_distance(), x, z),)


def kronecker_sparse(make: Maker) -> Iterator[tuple[str, Callable]]:
    pattern = (2, 24, 16, 4)
    w = make(*pattern, recorded=True)
    for last in (False, True):
        x = make(make.rows, 128)
        x = (x.mT.contiguous() if last else x).requires_grad_()
        factor = kl.KroneckerSparse(*pattern, batch_last=last)
        yield f"batch_last={last}", partial(_slopes, partial(kl.run_kernel, factor), (x, w), True)
    chain = kl.KroneckerSparseChain((kl.KroneckerSparse(2, 16, 16, 4),) * 2)
    again, first = make(2, 16, 16, 4, recorded=True), make(2, 16, 16, 4, recorded=True)
    x = make(make.rows, 128, recorded=True)
    yield "chain", partial(_slopes, partial(kl.run_kernel, chain), (x, first, again), False)
    weight = make(*pattern)
    for algo in ("auto", "einsum", "bmm", "dense"):
        layer = KSLinear([pattern], weights=[weight], algo=algo, bias=False, activation="gelu")
        yield algo, partial(_slopes, layer, (x,), False)


def compressed(make: Maker) -> Iterator[tuple[str, Callable]]:
    dense = sparse.magnitude(make(200, 333), 0.3)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype in dtypes if make.device != "cpu" else dtypes[1:2]:
        for form in FORMATS:
            w = sparse.compress(dense.to(dtype), form)
            for vectors in (1, 7, 33):
                x = make(vectors, 333).to(dtype).requires_grad_()
                call = partial(_slopes, partial(sparse.matmul, w), (x,), False)
                yield f"{form} {dtype} {vectors}", call
            yield (
                f"{form} {dtype}",
                lambda form=form, dtype=dtype: tuple(
                    sparse.compress(dense.to(dtype), form).tensors.values()
                ),
            )


def iterative(make: Maker) -> Iterator[tuple[str, Callable]]:
    x, y = make(make.rows, 5), make(make.rows, 2)

    def solved() -> tuple[torch.Tensor, ...]:  # a preconditioner would be cuSOLVER's
        numbers = {"regularization": 1.0, "bandwidth": 2.0, "rank": 0}
        found = linalg.solve_kernel(kl.gaussian(), x, y, tol=1e-3, **numbers)
        return found.x, found.residual

    yield "solve_kernel", solved


def direct(make: Maker) -> Iterator[tuple[str, Callable]]:
    m, b = make(65, 65), make(65, 2)
    a = m @ m.mT + torch.eye(65, device=make.device)
    yield "solve_cholesky", lambda: linalg.solve_cholesky(a, b)
    yield "solve_lu", lambda: linalg.solve_lu(a, b)
    yield "eigh", lambda: linalg.eigh(a)


@contextmanager
def deterministic() -> Iterator[None]:
    """Warns, as cuBLAS asks for an environment variable that is read once a process."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
    texts = [str(w.message) for w in found]
    assert not [t for t in texts if "does not have a deterministic implementation" in t], texts


def same_bits(family: Callable, device: str, rows: int) -> None:
    for name, call in family(Maker(device, rows)):
        first = call()
        found = [call()]
        with deterministic():
            found += [call(), call()]
        for again in found:
            for x, y in zip(first, again, strict=True):
                assert x.dtype == y.dtype and torch.equal(x, y), name
