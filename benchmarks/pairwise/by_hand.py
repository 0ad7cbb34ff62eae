"""Reductions in plain torch as an expert writes them: blocks of rows of K from one product of
matrices, or, for torch.compile to fuse with the sums that follow, from differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

BLOCK_ENTRIES = 1 << 28  # of K that are held at once: 1 GB of float32
FUSED_FEATURES = 8  # up to which torch.compile takes a sum over features into the kernel behind it


def rows_at_once(rows: int, others: int) -> int:
    """Rows of a block: a divisor of all, so that torch.compile meets one shape."""
    most = min(rows, max(1, BLOCK_ENTRIES // others))
    return next(count for count in range(most, 0, -1) if rows % count == 0)


def half_norms(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x.square().sum(-1)


def compiled(function: Callable) -> Callable:
    """By torch.compile, for one shape."""
    torch._dynamo.reset()  # past eight shapes of one function it would be run as it is
    return torch.compile(function, dynamic=False, fullgraph=True)


def is_fused(kernel: str, features: int) -> bool:
    """Whether a compiled block of K is made of differences, which no product has for p = 1."""
    return kernel != "gaussian" or features <= FUSED_FEATURES


def logarithms(kernel: str, a: torch.Tensor, b: torch.Tensor, bandwidth, fused: bool):
    """Of the entries of a block of K."""
    if not fused:
        a, b = a / bandwidth, b / bandwidth
        return torch.addmm(-half_norms(b), a, b.mT) - half_norms(a)[:, None]
    difference = a[:, None] - b[None]
    if kernel == "gaussian":
        return difference.square().sum(-1) * (-0.5 / bandwidth**2)
    return difference.abs().sum(-1) / -bandwidth


# K v.


def products(problem) -> dict[str, Callable]:
    """Ways of ``f(a, b, v, out)``, of a problem with a kernel, features and a bandwidth."""
    found = {} if problem.kernel != "gaussian" else {"addmm": product(problem.bandwidth)}
    return {**found, "torch.compile": compiled_product(problem)}


def product(bandwidth: float) -> Callable:
    """For the Gaussian. The factor of a's norms stands before the sum over b, which leaves addmm,
    exp and a product to pass over a block; none overflows while points are some bandwidths from
    their centre."""

    def call(a, b, v, out):
        a, b = a / bandwidth, b / bandwidth
        factors, norms = torch.exp(-half_norms(a)), -half_norms(b)
        step = rows_at_once(len(a), len(b))
        for some, where in zip(a.split(step), out.split(step), strict=True):
            torch.matmul(torch.addmm(norms, some, b.mT).exp_(), v, out=where)
        return out.mul_(factors if v.dim() == 1 else factors[:, None])

    return call


def compiled_product(problem) -> Callable:
    fused = is_fused(problem.kernel, problem.features)

    def rows(a, b, v):
        matrix = logarithms(problem.kernel, a, b, problem.bandwidth, fused).exp()
        return (matrix * v).sum(1) if v.dim() == 1 else matrix @ v

    block = compiled(rows)

    def call(a, b, v, out):
        step = rows_at_once(len(a), len(b))
        for some, where in zip(a.split(step), out.split(step), strict=True):
            where.copy_(block(some, b, v))
        return out

    return call


# K(x, x) v and its gradients.


class Points(NamedTuple):
    """Some rows of x, v and the gradient of the product."""

    x: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor

    def split(self, step: int) -> list[Points]:
        return [Points(*some) for some in zip(*(t.split(step) for t in self), strict=True)]


def gradients(problem) -> dict[str, Callable]:
    """Ways of ``f(x, v, bandwidth, g, _)``, of a problem with a kernel, features and ``wanted``."""
    fused = is_fused(problem.kernel, problem.features)
    ways = {"torch.compile": gradient(problem.wanted, compiled(rows_of(problem, fused)))}
    if problem.kernel != "gaussian":
        return ways
    return {"addmm": gradient(problem.wanted, rows_of(problem, fused=False)), **ways}


def gradient(wanted: Sequence[str], block: Callable) -> Callable:
    """The wanted gradients by blocks, without autograd."""

    @torch.no_grad()
    def call(x, v, bandwidth, g, _):
        every = Points(x.detach(), v.detach(), g)
        blocks = every.split(rows_at_once(len(x), len(x)))
        parts = [block(some, every, bandwidth.detach()) for some in blocks]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if "bandwidth" in wanted:
            whole["bandwidth"] = whole["bandwidth"].sum()
        return [whole[name] for name in wanted]

    return call


def rows_of(problem, fused: bool) -> Callable:
    """``f(some, every, bandwidth)``: the product and the gradients of some rows by name, those of
    x and v whole, as K is symmetric; of the bandwidth what each row adds."""
    kernel, wanted = problem.kernel, problem.wanted
    power = 2 if kernel == "gaussian" else 1  # of the bandwidth, which the logarithm is over

    def rows(some: Points, every: Points, bandwidth):
        logs = logarithms(kernel, some.x, every.x, bandwidth, fused)
        matrix, found = logs.exp(), {}
        vectors = (every.v, every.g) if "v" in wanted else (every.v,)
        found["product"], *others = sums(matrix, vectors, fused)
        if "v" in wanted:
            found["v"] = others[0]
        if "x" in wanted:
            worth = matrix * (some.g[:, None] * every.v + some.v[:, None] * every.g)
            found["x"] = slopes(kernel, worth, some.x, every.x, fused) / bandwidth**power
        if "bandwidth" in wanted:
            (total,) = sums(matrix * logs, (every.v,), fused)
            found["bandwidth"] = some.g * total * (-power / bandwidth)
        return found

    return rows


def sums(matrix: torch.Tensor, vectors: Sequence[torch.Tensor], fused: bool):
    """Products of a block and vectors: all at once where it is stored."""
    if fused:
        return tuple((matrix * vector).sum(1) for vector in vectors)
    return (matrix @ torch.stack(tuple(vectors), 1)).unbind(1)


def slopes(kernel: str, worth: torch.Tensor, a: torch.Tensor, b: torch.Tensor, fused: bool):
    """Sums over b of ``worth`` times the logarithm's derivative by a, but for the bandwidth."""
    if not fused:
        return worth @ b - worth.sum(1, keepdim=True) * a
    columns = []
    for one, others in zip(a.unbind(1), b.unbind(1), strict=True):
        difference = others - one[:, None]
        slope = difference if kernel == "gaussian" else difference.sign()
        columns.append((worth * slope).sum(1))
    return torch.stack(columns, 1)


# Neighbours.


def nearest(k: int) -> Callable:
    """``f(a, b, out)``: squared distances to the k nearest points, and their places. The norms of
    a, which order nothing, are added to the k."""

    def call(a, b, out):
        norms, step, values, places = b.square().sum(1), rows_at_once(len(a), len(b)), [], []
        for some in a.split(step):
            found = torch.addmm(norms, some, b.mT, alpha=-2).topk(k, largest=False)
            values.append((found.values + some.square().sum(1, keepdim=True)).clamp_(min=0))
            places.append(found.indices)
        return torch.cat(values), torch.cat(places)

    return call
