"""Formulas that GPU tests compute, and their tensors."""

from __future__ import annotations

import torch

import kernlib as kl

POINTS = {"x": ("row", "feature"), "y": ("col", "feature")}
FORMULAS = {
    "row+col": ("exp(-sum((x - y) ** 2) / (s * t)) * w", {**POINTS, "s": "row", "t": "col",
                                                          "w": "col"}),
    "two sums": ("exp(-sum(abs(x - y)) / h) * (1 + sum(u * z))",
                 {**POINTS, "u": ("row", "feature"), "z": ("col", "feature"), "h": ()}),
    "matrix": ("m * sum(x * y) + where(row < col, s, t)",
               {**POINTS, "m": ("row", "col"), "s": "row", "t": "col"}),
    "scales": ("1 / (1 + sum(((x - y) / g) ** 2))", {**POINTS, "g": "feature"}),
    "periodic": ("exp(-2 * sum(sin(pi * (x - y) / h) ** 2)) + 0.1 * tanh(sum(x * y))",
                 {**POINTS, "h": ()}),
    "whole": ("where((row + i) % 3 == j % 3, sqrt(sum((x - y) ** 2)), clamp(sum(x), -1, 1))",
              {**POINTS, "i": "row", "j": "col"}),
    "bools": ("where(q and not r, max(sum(x), sum(y)), -sum(x * y) / 4)",
              {**POINTS, "q": "row", "r": "col"}),
}  # fmt: skip
WHOLE, BOOLS = ("i", "j"), ("q", "r")


def formula(name: str) -> kl.Formula:
    return kl.Formula(*FORMULAS[name])


def drawn(name: str, m: int, n: int, k: int, dtype: torch.dtype, batch: int = 0) -> dict:
    """Tensors in host memory, of which those of columns have a batch, if there is one."""
    generator = torch.Generator().manual_seed(m + n + k)
    sizes = {"row": m, "col": n, "feature": k}
    values = {}
    for each, of in FORMULAS[name][1].items():
        of = (of,) if isinstance(of, str) else of
        size = [
            sizes[axis] if each not in ("u", "z") or axis != "feature" else k + 2 for axis in of
        ]
        size = [batch, *size] if batch and "col" in of else size
        if each in WHOLE:
            values[each] = torch.randint(-9, 9, size, generator=generator)
        elif each in BOOLS:
            values[each] = torch.rand(size, generator=generator) < 0.5
        elif len(of) == 2 and "feature" in of:
            values[each] = torch.randn(size, generator=generator).div(k**0.5).to(dtype)
        else:
            values[each] = torch.rand(size, generator=generator).add(0.5).to(dtype)
    return values


def placed(values: dict, device: str, wide: bool = False) -> dict:
    """On a device, perhaps in float64, numbers requiring gradients."""
    result = {}
    for name, t in values.items():
        t = t.double() if wide and t.is_floating_point() else t
        t = t.to(device)
        result[name] = t.requires_grad_() if t.is_floating_point() else t
    return result


def reductions(formula: kl.Formula, values: dict, v: torch.Tensor, pairs=None) -> dict:
    """The result of each reduction."""
    options = {"pairs": pairs, **values}
    results = {
        "matmul": kl.kernel_matmul(formula, v=v, **options),
        "vector": kl.kernel_matmul(formula, v=v[..., 0].contiguous(), **options)
        if v.dim() == 2 else v.new_zeros(1),
        "sum": kl.kernel_sum(formula, **options),
        "logsumexp": kl.kernel_logsumexp(formula, **options),
        "min": kl.kernel_min(formula, **options)[0],
        "softmax": kl.kernel_softmax_matmul(formula, v=v, **options),
    }  # fmt: skip
    if pairs is None:
        results["matrix"] = kl.run_kernel(formula, **values)
    return results
