"""Calls of Kronecker products: which kernels are compiled for some, and launches of others on GPUs
that exist only by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

import kernlib as kl
from tests.architecture.golden_blocks import tensor
from tests.architecture.golden_cases import ARCHS, compiled, meta
from tests.support.fakes import OnGpu, OnSecondGpu

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
EPILOGUE = (kl.Bias(), kl.Gelu())
SHAPES = {
    "5x3 7x11": ((5, 3), (7, 11)),
    "2^7": ((2, 2),) * 7,
    "8^5": ((8, 8),) * 5,
    "16^4": ((16, 16),) * 4,
    "24^4": ((24, 24),) * 4,
    "32^4": ((32, 32),) * 4,
    "64^2": ((64, 64),) * 2,
    "64^3": ((64, 64),) * 3,
    "128^2": ((128, 128),) * 2,
}


def specs() -> Iterator[tuple[str, Callable]]:
    """Every variant of descriptors, and calls whose gradient is recorded."""
    for name, side, dtypes, archs in VARIANTS:
        descriptor = kl.KroneckerProduct(SHAPES[name], side=side)
        yield f"kronecker {name} {side}", partial(compiled, descriptor, archs, dtypes=dtypes)
    for name, dtype in product(("5x3 7x11", "64^2"), (SINGLE, HALF)):
        descriptor = kl.KroneckerProduct(SHAPES[name], epilogue=EPILOGUE)
        x = meta(1000, descriptor.in_features, dtype=dtype, grad=True)
        factors = [meta(*shape, dtype=dtype, grad=True) for shape in descriptor.shapes]
        call = {"specs": (x, *factors), "bias": meta(descriptor.out_features, dtype=dtype)}
        recorded = partial(compiled, descriptor, ("sm_90a",), **call)
        yield f"kronecker {name} {dtype}, recorded", recorded


VARIANTS = (
    ("5x3 7x11", "right", (SINGLE, HALF, DOUBLE), ARCHS),
    ("8^5", "left", (SINGLE, HALF), ("sm_90a",)),
    ("24^4", "right", (SINGLE, HALF), ("sm_120",)),
    ("64^3", "right", (SINGLE, HALF), ("sm_90a",)),
)


def call(name: str, rows: int, dtype, side="right", kind=OnGpu, lead=(), **options) -> Callable:
    shapes = SHAPES[name]
    wide = math.prod(shape[side == "left"] for shape in shapes)
    x = tensor(*lead, *((rows, wide) if side == "right" else (wide, rows)), dtype=dtype, kind=kind)
    factors = [tensor(*shape, dtype=dtype, kind=kind) for shape in shapes]
    return lambda: kl.kron_matmul(x, factors, side=side, **options)


NUMBERS = {
    "fp32": (SINGLE, {"precision": "fp32"}),
    "tf32": (SINGLE, {"precision": "tf32"}),
    "float16": (HALF, {}),
    "float64": (DOUBLE, {}),
}


def launches() -> dict[str, Callable]:
    calls = {}
    for name, numbers, side in product(SHAPES, NUMBERS, ("right", "left")):
        dtype, options = NUMBERS[numbers]
        calls[f"kronecker {name} {numbers} {side}"] = call(name, 100, dtype, side, **options)
    for name, numbers in product(("5x3 7x11", "16^4", "64^2", "24^4"), NUMBERS):
        dtype, options = NUMBERS[numbers]
        key = f"kronecker {name} {numbers}"
        calls[f"{key} of few rows"] = call(name, 3, dtype, **options)
        calls[f"{key} on sm_86"] = call(name, 100, dtype, kind=OnSecondGpu, **options)
    return calls | with_options()


def with_options() -> dict[str, Callable]:
    calls, number = {}, tensor(1)[0]
    for name, dtype in product(("64^2", "24^4", "5x3 7x11"), (SINGLE, HALF)):
        wide = math.prod(columns for _, columns in SHAPES[name])
        y, out = tensor(100, wide, dtype=dtype), tensor(wide, 100, dtype=dtype).T
        for words, options in {
            "scaled": {"alpha": 2.0},
            "scaled by a tensor": {"alpha": number.to(dtype)},
            "added": {"alpha": number.to(dtype), "beta": 0.5, "y": y},
            "into": {"out": out},
            "added into": {"beta": 0.5, "y": y, "out": y},
        }.items():
            calls[f"kronecker {name} {dtype} {words}"] = call(name, 100, dtype, **options)
        calls[f"kronecker {name} {dtype} of batches"] = call(name, 10, dtype, lead=(3, 2))
        descriptor = kl.KroneckerProduct(SHAPES[name], epilogue=EPILOGUE)
        x = tensor(100, descriptor.in_features, dtype=dtype)
        factors = [tensor(*shape[::-1], dtype=dtype).T for shape in descriptor.shapes]
        many = [tensor(3, *shape, dtype=dtype) for shape in descriptor.shapes]
        biased = partial(kl.run_kernel, descriptor, bias=tensor(wide, dtype=dtype))
        calls[f"kronecker {name} {dtype} of views, biased"] = partial(biased, x, *factors)
        calls[f"kronecker {name} {dtype} of many, biased"] = partial(biased, x, *many)
        calls[f"kronecker {name} {dtype} of a vector"] = partial(kl.kron_matmul, x[0], factors)
    return calls


def tunable() -> dict[str, tuple]:
    """Descriptors, and tensors of a call of each that can be tuned."""
    calls = {}
    for name, dtype, side in (("16^4", SINGLE, "right"), ("64^2", HALF, "left")):
        descriptor = kl.KroneckerProduct(SHAPES[name], side=side)
        shape = (100, descriptor.in_features)[:: 1 if side == "right" else -1]
        factors = (tensor(*size, dtype=dtype) for size in descriptor.shapes)
        calls[f"kronecker {name} {side}"] = (descriptor, tensor(*shape, dtype=dtype), *factors)
    return calls
