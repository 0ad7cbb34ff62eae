"""Pairwise calls that are compiled: of descriptors made before, of those made inside, recorded."""

from __future__ import annotations

import torch

import kernlib as kl
from tests.contract.library.cases import Call, Near, values

M, N, K, L = 5, 7, 9, 3
LAPLACE, SYMMETRIC, NORM = kl.laplace_l1(), kl.gaussian(symmetric=True), kl.p_distance()
PQ, EXPONENTIAL = kl.laplace_pq(), kl.Pairwise(inner=kl.ExpPower())
CUSTOM = kl.l1_distance(epilogue=kl.Custom("tanh(gain * v) + shift", ("gain", "shift")))
A, B, BATCH_A, BATCH_B = values(M, K), values(N, K), values(L, M, K), values(L, N, K)
ONE, SEVERAL = torch.tensor(2.0), torch.tensor([0.8, 1.6, 2.4])
SIDES, THREE = (0, 1), (0, 1, 2)
COARSE = Near(plain=(0, 0), recorded=(2e-2, 2e-2), slopes=(2e-2, 2e-2))


def laplace(a, b, width=2.0, **arguments):
    return kl.run_kernel(LAPLACE, a, b, bandwidth=width, **arguments)


def into(a, b):
    """Written, added to, and used again."""
    out = torch.full((a.shape[-2], b.shape[-2]), 2.0)
    first = laplace(a, b, out=out)
    laplace(a, b, out=first, accumulate=True)
    return out + 1, first * 2


def both(run, *operands) -> Call:
    """Of two sides."""
    return Call(run, operands or (A, B), SIDES)


def half(dtype) -> Call:
    def run(a, b, width):
        return kl.run_kernel(kl.laplace_l2(), a, b, bandwidth=width)

    return Call(run, (BATCH_A.to(dtype), B.to(dtype), SEVERAL), THREE, COARSE)


CALLS = {
    "float": both(lambda a, b: laplace(a, b, 10.0)),
    "int": both(lambda a, b: laplace(a, b, 10)),
    "0-d": Call(laplace, (A, B, ONE), THREE),
    "(L,)": Call(laplace, (A, B, SEVERAL), THREE),
    "mixed": Call(
        lambda a, b, w: kl.run_kernel(PQ, a, b, q=0.8, bandwidth=w, p=1.3),
        (BATCH_A, B, SEVERAL), THREE,
    ),
    "p tensor": Call(lambda a, b, p: kl.run_kernel(NORM, a, b, p=p), (A, BATCH_B, SEVERAL), THREE),
    "custom": Call(
        lambda a, b, gain: kl.run_kernel(CUSTOM, a, b, shift=0.5, gain=gain),
        (A, B, SEVERAL), THREE,
    ),
    "symmetric": Call(lambda a: kl.run_kernel(SYMMETRIC, a, bandwidth=2.0), (BATCH_A,), (0,)),
    "offsets": both(
        lambda a, b: laplace(a, b, regularization=0.5, row_offset=3, col_offset=1)
    ),
    "debug": both(lambda a, b: laplace(a, b, debug=True)),
    "half": both(laplace, A.half(), B.half())._replace(near=COARSE),
    "double": both(laplace, A.double(), B.double()),
    "transposed": both(laplace, A.T.contiguous().T, B[:, ::1]),
    "out": Call(into, (A, B)),
    "half into float": Call(into, (A.half(), B.half())),
    "cdist": both(kl.cdist),
    "cdist p": both(lambda a, b: kl.cdist(a, b, p=1.5)),
    "cdist inf": both(lambda a, b: kl.cdist(a, b, p=float("inf"))),
    "cdist batches": both(lambda a, b: kl.cdist(a[:, None], b, p=1.5), BATCH_A, BATCH_B),
    "cdist batch p": Call(
        lambda a, b, p: kl.cdist(a[:1], b, p=p), (BATCH_A, B, SEVERAL), THREE
    ),
    "cdist out": Call(
        lambda a, b: kl.cdist(a[None], b, 3, out=torch.ones(1, L, M, N)) + 1, (BATCH_A, BATCH_B)
    ),
}  # fmt: skip

# Descriptors that the compiled function makes.
INSIDE = {
    "laplace": both(lambda a, b: kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=2.0)),
    "gaussian": both(lambda a, b: kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0)),
    "symmetric": Call(
        lambda a: kl.run_kernel(kl.gaussian(symmetric=True), a, bandwidth=2.0), (A,), (0,)
    ),
    "distance": both(lambda a, b: kl.run_kernel(kl.p_distance(), a, b, p=1.5)),
    "polynomial": both(lambda a, b: kl.run_kernel(kl.polynomial(2), a, b, gamma=0.5, offset=1.0)),
    "cubic": both(lambda a, b: kl.run_kernel(kl.polynomial(), a, b, gamma=0.5, offset=1.0)),
    "power": both(lambda a, b: kl.run_kernel(kl.laplace_pq(), a, b, p=1.3, q=0.8, bandwidth=2.0)),
    "matern": both(lambda a, b: kl.run_kernel(kl.matern52(), a, b, bandwidth=2.0)),
    "parts": both(
        lambda a, b: kl.run_kernel(
            kl.Pairwise(
                inner=kl.Square(), outer=kl.Sqrt(), epilogue=(kl.Laplace(), kl.Scale("gain"))
            ),
            a, b, bandwidth=2.0, gain=3.0,
        )
    ),
    "replaced": Call(
        lambda a: kl.run_kernel(LAPLACE.replace(symmetric=True), a, bandwidth=2.0), (A,), (0,)
    ),
    "default": both(lambda a, b: kl.run_kernel(kl.Pairwise(), a, b)),
}  # fmt: skip

# What is recorded in ways of its own.
GRADIENTS = {
    "l1": both(lambda a, b: kl.run_kernel(kl.l1_distance(), a, b).sin()),
    "gaussian": Call(
        lambda a, b, w: kl.run_kernel(kl.gaussian(), a, b, bandwidth=w).sin(), (A, B, ONE), THREE
    ),
    "pq": Call(
        lambda a, b, p, w: kl.run_kernel(PQ, a, b, q=0.9, p=p, bandwidth=w).sin(),
        (A, B, torch.tensor(1.4), ONE), (0, 1, 2, 3),
    ),
    "host p": Call(
        lambda a, b, w: kl.run_kernel(PQ, a, b, p=1.4, q=0.9, bandwidth=w).sin(),
        (A, B, ONE), THREE,
    ),
    "polynomial": Call(
        lambda a, b, c: kl.run_kernel(kl.polynomial(2), a, b, gamma=0.5, offset=c).sin(),
        (A, B, torch.tensor(1.0)), THREE,
    ),
    "symmetric": Call(
        lambda a, w: kl.run_kernel(SYMMETRIC, a, regularization=0.5, bandwidth=w).sin(),
        (A, ONE), SIDES,
    ),
    "exponential": Call(
        lambda a, b, s: kl.run_kernel(EXPONENTIAL, a, b, p=1.4, inner_scale=s).sin(),
        (A, B, torch.tensor(-0.5)), THREE,
    ),
    "largest": both(lambda a, b: kl.run_kernel(NORM, a, b, p=float("inf")).sin()),
    "float16": half(torch.float16),
    "bfloat16": half(torch.bfloat16),
    "layers": Call(
        lambda a, b, weight: (kl.cdist(a @ weight, b @ weight, p=1.5) + 1).log(),
        (BATCH_A, B, values(K, K)), THREE, Near((1e-6, 1e-6), (1e-4, 1e-5), (1e-4, 1e-5)),
    ),
}  # fmt: skip
