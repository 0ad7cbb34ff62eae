"""Calls of every family of sizes drawn at random, the same ones always."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import kernlib as kl
from benchmarks.kronecker_product import rivals as of_kronecker_product
from benchmarks.kronecker_product.problems import Problem as KroneckerProblem
from benchmarks.kronecker_product.problems import drawn as drawn_factors
from benchmarks.kronecker_product.problems import tensors
from benchmarks.kronecker_product.run import descriptor_of
from kernlib import blocksparse
from kernlib.families.sparse.formats.registry import FORMATS
from kernlib.sparse import SparseMatrix

COUNT, SEED = 100, 2026  # of each family
MOST_BYTES = 1e9  # of all tensors of a call
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


class Way(NamedTuple):
    """``call(*buffers)``, whose buffers are tensors, so that a timer can copy them."""

    call: Callable[..., torch.Tensor]
    buffers: tuple[torch.Tensor, ...]


class Call(NamedTuple):
    """A call as kernlib chooses, the descriptor and tensors that its kernels are asked for with, or
    None where other ways of its own are all there are, and other ways by name."""

    auto: Way
    asked: tuple[Any, tuple, dict] | None
    others: dict[str, Way]


class Problem(NamedTuple):
    """A family's call: its numbers in words, and what makes it on a device."""

    family: str
    words: str
    make: Callable[[str], Call]

    @property
    def name(self) -> str:
        return f"auto {self.family} {self.words}"


def problems(count: int = COUNT) -> list[Problem]:
    """All, family after family; fewer of one where draws repeat."""
    makers = pairwise, kronecker_sparse, kronecker_product, sparse, block_sparse
    found = {}
    for maker in makers:
        source = random.Random(f"{SEED} {maker.__name__}")
        for _ in range(count):
            problem = maker(source)
            found[problem.name] = problem
    return list(found.values())


def between(source: random.Random, low: float, high: float) -> int:
    """A whole number, as likely between 1 and 2 as between 1000 and 2000."""
    return round(2 ** source.uniform(math.log2(low), math.log2(high)))


def _normal(device: str, kind: str, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device=device).to(DTYPES[kind])


# Pairwise.


def pairwise(source: random.Random) -> Problem:
    """A kernel matrix or distances of random points."""
    name = source.choice(["gaussian", "l2_distance", "l1_distance", "laplace_l1"])
    m, n, k = between(source, 10, 20000), between(source, 10, 20000), between(source, 1, 1000)
    while 4.0 * m * n > MOST_BYTES:
        m, n = m // 2, n // 2

    def make(device: str) -> Call:
        descriptor = getattr(kl, name)()
        x, y = _normal(device, "fp32", m, k), _normal(device, "fp32", n, k)
        given = {"bandwidth": k**0.5} if descriptor.parameters else {}
        buffers = x, y, torch.empty(m, n, device=device)

        def ours(x, y, out):
            return kl.run_kernel(descriptor, x, y, out=out, **given)

        def theirs(x, y, out):
            p = 1.0 if name.endswith("l1") or name.startswith("l1") else 2.0
            found = torch.cdist(x, y, p=p)
            if name == "gaussian":
                return found.square_().mul_(-1 / (2 * k)).exp_()
            return found.mul_(-(k**-0.5)).exp_() if name == "laplace_l1" else found

        asked = descriptor, (x, y), {"out": buffers[2], **given}
        return Call(Way(ours, buffers), asked, {"torch": Way(theirs, buffers)})

    return Problem("pairwise", f"{name} {m}x{n}x{k}", make)


# Kronecker-sparse factors.


def kronecker_sparse(source: random.Random) -> Problem:
    """A factor of any pattern, on some rows."""
    kind = source.choice([*DTYPES])
    a, d = between(source, 1, 64), between(source, 1, 64)
    b, c = between(source, 4, 512), between(source, 4, 512)
    rows = between(source, 1, 16384)
    while 4.0 * (rows * a * d * (b + c) + a * b * c * d) > MOST_BYTES:
        rows, a = max(1, rows // 2), max(1, a // 2)

    def make(device: str) -> Call:
        descriptor = kl.KroneckerSparse(a, b, c, d)
        x = _normal(device, kind, rows, a * c * d)
        weight = _normal(device, kind, a, b, c, d) / c**0.5
        buffers = x, weight, torch.empty(rows, a * b * d, dtype=DTYPES[kind], device=device)

        def ours(x, weight, out):
            return kl.run_kernel(descriptor, x, weight, out=out)

        def einsum(x, weight, out):
            product = torch.einsum("nikl,ijkl->nijl", x.view(-1, a, c, d), weight)
            return product.reshape(out.shape)

        others = {"einsum": Way(einsum, buffers)}
        if 2.0 * a * a * b * c * d * d < MOST_BYTES / 2:
            others["dense"] = Way(_by_dense_matrix, buffers)
        return Call(Way(ours, buffers), (descriptor, (x, weight), {"out": buffers[2]}), others)

    return Problem("kronecker_sparse", f"({a},{b},{c},{d}) {rows} rows {kind}", make)


def _by_dense_matrix(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A factor as a dense matrix, which each call makes: training changes the weight between two of
    them, and kernels read it as it is."""
    a, b, c, d = weight.shape
    width = a * c * d
    matrix = x.new_zeros(a * b * d, width)
    strides = b * d * width + c * d, d * width, d, width + 1
    matrix.as_strided(weight.shape, strides).copy_(weight)
    return torch.mm(x, matrix.mT, out=out)


# Kronecker products.


def kronecker_product(source: random.Random) -> Problem:
    """Of the factors that the family's own benchmark draws, in float32 and float64."""
    rows, sizes = source.choice(drawn_factors())
    kind = source.choice(["fp32", "fp64"])
    problem = KroneckerProblem("drawn", rows, sizes, kind)

    def make(device: str) -> Call:
        x, factors, out = tensors(problem, device)
        descriptor, buffers = descriptor_of(problem), (x, *factors, out)

        def ours(*given):
            return kl.run_kernel(descriptor, *given[:-1], out=given[-1])

        def way(call) -> Way:
            return Way(lambda x, *rest: call(x, rest[:-1]), buffers)

        others = {name: way(call) for name, call in of_kronecker_product.rivals(problem).items()}
        return Call(Way(ours, buffers), (descriptor, buffers[:-1], {"out": out}), others)

    return Problem("kronecker_product", problem.name.removeprefix("kronecker_product "), make)


# Sparse weights.


def sparse(source: random.Random) -> Problem:
    """A weight of which entries anywhere are 0, times some vectors, in every format."""
    rows, cols = between(source, 64, 16384), between(source, 64, 16384)
    density, columns = round(2 ** source.uniform(-6, 0), 3), between(source, 1, 64)

    def make(device: str) -> Call:
        dense = _normal(device, "fp16", rows, cols)
        dense *= torch.rand(rows, cols, device=device) < density
        x = _normal(device, "fp16", columns, cols) / cols**0.5
        out = torch.empty(columns, rows, dtype=torch.float16, device=device)
        auto = kl.sparse.compress(dense, columns=columns)

        def way(w: SparseMatrix) -> Way:
            def call(x, out, *tensors):
                return kl.sparse.matmul(SparseMatrix.from_layout(w.layout, tensors), x, out=out)

            return Way(call, (x, out, *w.operands))

        others = {"cublas": Way(lambda x, out, w: torch.mm(x, w.mT, out=out), (x, out, dense))}
        for name in FORMATS:
            if name not in (auto.format, "dense"):
                try:
                    others[f"own {name}"] = way(kl.sparse.compress(dense, name))
                except ValueError:  # of a format that cannot hold it
                    continue
        return Call(way(auto), None, others)

    return Problem("sparse", f"{rows}x{cols} density={density:g} N={columns} fp16", make)


# Block-sparse products.


def block_sparse(source: random.Random) -> Problem:
    """A product of some mode with a random layout."""
    mode, block = source.choice(["sdd", "dsd", "dds"]), source.choice([16, 32, 64, 128])
    grid = [max(1, between(source, 128, 8192) // block) for _ in range(2)]
    density, columns = round(2 ** source.uniform(-5, 0), 3), between(source, 8, 8192)
    columns = max(8, columns // 8 * 8)
    kind = source.choice([*DTYPES])
    rows, cols = (n * block for n in grid)

    def make(device: str) -> Call:
        layout = blocksparse.random(rows, cols, block, density, device=device)
        descriptor = kl.BlockSparseMatmul(mode, precision="fp32")
        values = _normal(device, kind, layout.capacity, block, block)
        shapes = {
            "sdd": ((rows, columns), (columns, cols), tuple(values.shape)),
            "dsd": (None, (cols, columns), (rows, columns)),
            "dds": ((columns, rows), None, (columns, cols)),
        }
        *given, last = shapes[mode]
        a, b = (values if shape is None else _normal(device, kind, *shape) for shape in given)
        out = torch.empty(last, dtype=DTYPES[kind], device=device)

        def ours(a, b, out):
            return kl.run_kernel(descriptor, layout, a, b, out=out)

        pairs = zip((a, b), given, strict=True)
        dense = [layout.to_dense(t) if shape is None else t for t, shape in pairs]
        whole = torch.empty(dense[0].shape[0], dense[1].shape[1], dtype=DTYPES[kind], device=device)
        others = {"cublas": Way(lambda a, b, out: torch.mm(a, b, out=out), (*dense, whole))}
        asked = descriptor, (layout, a, b), {"out": out}
        return Call(Way(ours, (a, b, out)), asked, others)

    words = f"{mode} {rows}x{cols} block={block} density={density:g} N={columns} {kind}"
    return Problem("blocksparse", words, make)
