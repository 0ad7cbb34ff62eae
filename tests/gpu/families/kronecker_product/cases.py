"""Operands of Kronecker products on the GPU, and these products in float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch

import kernlib as kl
from kernlib import ahead
from kernlib.jit import service
from kernlib.runtime.devices import arch_of

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
TYPES = {"fp32": F32, "fp64": F64, "fp16": F16, "bf16": BF16}
GATES = {F64: 1e-13, F32: 1e-6, F16: 1e-3, BF16: 8e-3}
SIDES = ("right", "left")
# One factor and many, in one launch and in several, in place and not, merged and not.
SHAPES = (
    ((1, 1),),
    ((3, 4),),
    ((128, 128),),
    ((7, 100),),
    ((2, 2),) * 7,
    ((8, 8), (8, 8)),
    ((5, 3), (2, 7), (4, 4)),
    ((17, 9), (12, 31)),
    ((40, 24), (5, 33)),
    ((32, 32), (8, 8)),
    ((64, 64), (64, 64)),
    ((8, 8),) * 5,
    ((16, 16),) * 4,
    ((1, 3), (5, 1), *((1, 1),) * 63),
    ((127, 2), (2, 129)),
)


def operands(shapes, rows: int, side: str, dtype, batch=()) -> list[torch.Tensor]:
    """x and the factors, which leave the size of a number as it is."""
    wide = math.prod(shape[side == "left"] for shape in shapes)
    sizes = (rows, wide) if side == "right" else (wide, rows)
    made = [torch.randn(*batch, *sizes, device="cuda", dtype=F64)]
    for shape in shapes:
        factor = torch.randn(*batch, *shape, device="cuda", dtype=F64)
        if shape == (1, 1):  # the product of many is of no size at all
            factor = factor.sign() * torch.empty_like(factor).uniform_(0.75, 1.25)
        made.append(factor / shape[side == "left"] ** 0.5)
    return [t.to(dtype) for t in made]


def exact(x: torch.Tensor, factors, side: str) -> torch.Tensor:
    """The product in float64, a factor at a time."""
    y = x.double() if side == "right" else x.double().mT
    lead = torch.broadcast_shapes(y.shape[:-2], *(f.shape[:-2] for f in factors))
    y = y.expand(*lead, *y.shape[-2:])
    for factor in reversed(factors):
        f = factor.double() if side == "right" else factor.double().mT
        y = y.unflatten(-1, (-1, f.shape[-2]))  # (..., rows, rest, P)
        y = (y @ f.unsqueeze(-3)).mT.flatten(-2)  # Q in front of the rest
    return y if side == "right" else y.mT


def expected(x: torch.Tensor, factors, side: str) -> torch.Tensor:
    """The magnitude of each number of the product, were the signs of its terms random."""
    return exact(x.double().square(), [f.double().square() for f in factors], side).sqrt()


def check(
    found: torch.Tensor,
    wanted: torch.Tensor,
    gate: float,
    axis: int = -1,
    magnitude: torch.Tensor | None = None,
) -> None:
    """As a whole, and row by row: beside the norm of its result, or of the ``magnitude`` expected
    of that, where few terms may cancel."""
    found, whole, rows = found.double(), wanted.norm(), wanted.norm(dim=axis)
    if magnitude is not None:
        whole = torch.maximum(whole, magnitude.norm())
        rows = torch.maximum(rows, magnitude.norm(dim=axis))
    assert (found - wanted).norm() <= gate * whole
    assert ((found - wanted).norm(dim=axis) <= 3 * gate * rows + 1e-300).all()


def build(calls) -> None:
    """Have the kernels of calls, (descriptor, tensors), compiled side by side."""
    arch, found = arch_of(torch.cuda.current_device()), []
    for descriptor, tensors in calls:
        arguments = {name: tensors[0].new_ones(()) for name in descriptor.parameters}
        for name in descriptor.vectors:
            arguments[name] = tensors[0].new_ones(descriptor.out_features)
        device = tensors[0].get_device()
        found += ahead.specs(descriptor, arch, tuple(tensors), arguments, device)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda spec: service.build(spec, arch), dict.fromkeys(found)))


def product(shapes, side: str = "right", **options) -> kl.KroneckerProduct:
    return kl.KroneckerProduct(shapes, side=side, **options)
