"""Formulas in plain torch: their text evaluated by Python, of tensors (batch, rows, cols, features)
that broadcast."""

from __future__ import annotations

import torch

import kernlib as kl

M, N, K, K2, L = 5, 7, 3, 4, 2
SIZES = {"row": M, "col": N, "feature": K}
WIDE = {"u", "w"}  # tensors of a second sum, which have K2 features

_FUNCTIONS = {
    "abs": torch.abs, "clamp": torch.clamp, "cos": torch.cos, "erf": torch.erf, "exp": torch.exp,
    "expm1": torch.expm1, "floor": torch.floor, "log": torch.log, "log1p": torch.log1p,
    "ndtr": torch.special.ndtr, "sign": torch.sign, "sin": torch.sin, "sqrt": torch.sqrt,
    "tanh": torch.tanh, "pow": torch.pow, "pi": torch.pi, "mod": lambda x, y: x % y,
    "inf": torch.inf,
}  # fmt: skip


def drawn(axes: dict, seed: int = 0, batch=(), dtype=torch.float64) -> dict[str, torch.Tensor]:
    """A tensor of each name: positive numbers near 1. ``batch`` names have a batch in front."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, of in axes.items():
        of = (of,) if isinstance(of, str) else of
        size = [K2 if x == "feature" and name in WIDE else SIZES[x] for x in of]
        size = [L, *size] if name in batch else size
        if name.startswith("i"):
            values[name] = torch.randint(-5, 6, size, generator=generator)
        elif name.startswith("q"):
            values[name] = torch.rand(size, generator=generator) < 0.5
        else:
            values[name] = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)
            values[name] = values[name].to(dtype)
    return values


def in_four(t, of) -> torch.Tensor:
    """A tensor (batch, rows, cols, features)."""
    of = (of,) if isinstance(of, str) else of
    if not isinstance(t, torch.Tensor):
        return t
    t = t if t.dim() > len(of) else t[None]
    order = [x for x in ("row", "col", "feature") if x in of]
    t = t.permute(0, *(1 + of.index(x) for x in order))
    for place, axis in enumerate(("row", "col", "feature"), 1):
        t = t if axis in of else t.unsqueeze(place)
    return t.double() if t.is_floating_point() else t


def matrix(formula: kl.Formula, values: dict) -> torch.Tensor:
    """The scores (batch, rows, cols) in float64."""
    axes = dict(formula.axes)
    names = {name: in_four(t, axes[name]) for name, t in values.items()}
    rows = next(names[n].shape[1] for n, of in axes.items() if "row" in of)
    cols = next(names[n].shape[2] for n, of in axes.items() if "col" in of)
    names["row"] = torch.arange(rows)[None, :, None, None]
    names["col"] = torch.arange(cols)[None, None, :, None]
    batch = max([t.shape[0] for t in names.values() if isinstance(t, torch.Tensor)])

    def total(term, first=None, end=None):
        return term[..., first:end].sum(-1, keepdim=True)

    def where(condition, x, y):
        x, y = (z if isinstance(z, torch.Tensor) else torch.tensor(float(z)) for z in (x, y))
        return torch.where(condition, x.double(), y.double())

    functions = {**_FUNCTIONS, "sum": total, "where": where, "max": _wide(torch.maximum),
                 "min": _wide(torch.minimum)}  # fmt: skip
    result = eval(formula.expression, functions | names)
    return result.double().expand(batch, rows, cols, 1)[..., 0]


def _wide(function):
    def call(x, y):
        x, y = (z if isinstance(z, torch.Tensor) else torch.tensor(z) for z in (x, y))
        return function(x.double(), y.double())

    return call
