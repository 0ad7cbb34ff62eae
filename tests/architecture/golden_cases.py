"""A declared matrix of calls, and what they come to: the kernels of each, as canonical bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

import kernlib as kl
from kernlib.families.pairwise.kernels.gradient import Gradient, Scope, Subject
from kernlib.families.pairwise.kernels.gradient_tensor import TensorMma, TensorWgmma
from kernlib.families.sparse.lowering import choose as sparse_choose
from kernlib.jit import service
from kernlib.jit.entry import Entry
from kernlib.jit.spec import KernelSpec

ARCHS = ("sm_80", "sm_90a", "sm_120")
HALVES = (torch.float16, torch.bfloat16)


def meta(*shape: int, dtype=torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(grad)


def pairwise_descriptors() -> dict:
    custom = kl.l2_distance(epilogue=kl.Custom("exp(-v * rate) + offset", ("rate", "offset")))
    return {
        "l1": kl.l1_distance(),
        "l2": kl.l2_distance(),
        "squared": kl.squared_distance(precision="tf32"),
        "p": kl.p_distance(),
        "power": kl.power_sum(),
        "dot": kl.dot_product(),
        "exp power": kl.exp_power_sum(),
        "gaussian": kl.gaussian(),
        "gaussian symmetric": kl.gaussian(symmetric=True),
        "laplace pq": kl.laplace_pq(),
        "matern52": kl.matern52(),
        "polynomial": kl.polynomial(4),
        "custom": custom,
    }


def pairwise_calls() -> Iterator[tuple[str, Callable]]:
    """Every variant of descriptors, and the kernels of some calls."""
    for name, descriptor in pairwise_descriptors().items():
        for label, dtypes in (
            ("float32", torch.float32),
            ("float64", torch.float64),
            ("half", HALVES),
        ):
            yield f"pairwise {name} {label}", partial(compiled, descriptor, dtypes=dtypes)
    for m, n, k in ((1000, 800, 64), (7, 3, 1), (300, 200, 1023), (30000, 30000, 128)):
        for p in (0.5, 1.0, 1.7, 2.0, float("inf")):
            specs = meta(m, k), meta(n, k)
            yield f"cdist {m} {n} {k} {p}", partial(compiled, kl.p_distance(), specs=specs, p=p)
    turned = meta(64, 1000).T, meta(800, 64)
    yield "l1 of a transposed view", partial(compiled, kl.l1_distance(), specs=turned)


def kronecker_sparse_calls() -> Iterator[tuple[str, Callable]]:
    """Every variant of factors, and calls whose gradient is recorded."""
    scaled = kl.Custom("v * s", ("s",))
    epilogues = {"plain": (), "biased": (kl.Bias(), kl.Gelu()), "scaled": (scaled,)}
    for pattern in ((2, 48, 192, 1), (1, 64, 64, 8), (4, 16, 16, 4), (6, 3, 5, 7)):
        for name, epilogue in epilogues.items():
            factor = kl.KroneckerSparse(*pattern, epilogue=epilogue)
            every = partial(compiled, factor, dtypes=(torch.float32, *HALVES))
            yield f"Kronecker-sparse {pattern} {name}", every
        for batch_last, dtype in product((False, True), (torch.float32, torch.float16)):
            factor = kl.KroneckerSparse(*pattern, batch_last=batch_last)
            shape = (300, factor.in_features)
            x = meta(*(shape[::-1] if batch_last else shape), dtype=dtype, grad=True)
            w = meta(*factor.weight_shape, dtype=dtype, grad=True)
            name = f"Kronecker-sparse {pattern} {batch_last} {dtype}, recorded"
            yield name, partial(compiled, factor, specs=(x, w))


def sparse_calls() -> Iterator[tuple[str, Callable]]:
    """Every variant of products."""
    for name, epilogue in (("plain", ()), ("biased", (kl.Bias(), kl.Relu()))):
        for dtype in (torch.float32, *HALVES):
            yield (
                f"sparse {name} {dtype}",
                partial(compiled, kl.SparseMatmul(epilogue), dtypes=dtype),
            )


def by_tensor_cores(subject: Subject, arch: str) -> list[KernelSpec]:
    """Every variant of both kernels of pair gradients."""
    scope, kernels = Scope(arch, ("float32", "bfloat16")), (TensorWgmma(), TensorMma())
    every = [spec for one in kernels for spec in one.specs(subject, scope, arch)]
    return sorted(every, key=lambda spec: spec.source)


def internal() -> Iterator[tuple[str, Callable]]:
    """Kernels that no descriptor names."""
    dtypes = ("float32", "float64", "bfloat16")
    for slope, arch in product(("AbsSlope", "SquareSlope", "PowerSlope"), ARCHS):
        subject, name = Subject("Difference", slope), f"{slope} {arch}"
        direct = partial(Gradient().specs, subject, Scope(arch, dtypes), arch)
        yield f"pair gradient {name}", direct
        yield f"pair gradient by tensor cores {name}", partial(by_tensor_cores, subject, arch)
    for name in sparse_choose.formats():
        dtypes = ("float16", "bfloat16", "float32")
        yield f"{name} codec", partial(sparse_choose.codec_specs, name, dtypes)


def cases() -> Iterator[tuple[str, Callable]]:
    for calls in (pairwise_calls, kronecker_sparse_calls, sparse_calls, internal):
        yield from calls()


def compiled(descriptor, archs: tuple[str, ...] = ARCHS, **options) -> list[KernelSpec]:
    """What :func:`kernlib.compile` builds, in order."""
    found: list[KernelSpec] = []

    def build(spec: KernelSpec, arch: str) -> Entry:
        found.append(spec)
        return Entry("", b"", {})

    original, service.build = service.build, build
    try:
        kl.compile(descriptor, archs=archs, workers=1, progress=False, **options)
    finally:
        service.build = original
    return found


def digests(specs: list[KernelSpec]) -> tuple[int, str, str]:
    """How many specs, the digest of all, and that of all without what they include."""
    whole, bare = hashlib.sha256(), hashlib.sha256()
    for spec in specs:
        whole.update(spec.canonical())
        lines = [s for s in spec.source.splitlines() if not s.startswith("#include")]
        bare.update(spec._replace(source="\n".join(lines)).canonical())
    return len(specs), whole.hexdigest()[:32], bare.hexdigest()[:32]
