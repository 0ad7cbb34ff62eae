"""Pairwise calls that promise the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import kernlib as kl
from tests.support.repeats import Maker, slopes

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


def calls(make: Maker) -> Iterator[tuple[str, Callable]]:
    a, b = make(make.rows, 19, recorded=True), make(make.rows + 9, 19, recorded=True)
    v = make(make.rows + 9, 3)
    for name, numbers in KERNELS.items():
        run = partial(kl.run_kernel, descriptor(name), **numbers)
        twice = make.device != "cpu" or name in ("laplace_pq", "gaussian")
        yield name, partial(slopes, run, (a, b), twice)
    yield "Custom", partial(slopes, partial(kl.run_kernel, CUSTOM, gain=2.0), (a, b), True)
    for p in (0.5, 1.0, 2.0, 2.5):
        yield f"cdist {p}", partial(slopes, partial(kl.cdist, p=p), (a, b), p == 2)
    yield "cdist_expadd", partial(slopes, partial(kl.cdist_expadd, lengthscale=2.0), (a, b), True)
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
        yield name, partial(slopes, call, (a, b), False)
    yield "kernel_argmin", lambda: (kl.kernel_argmin(kl.l1_distance(), x, z),)
