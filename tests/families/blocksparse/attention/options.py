"""Calls of block-sparse attention with each option alone, and several, and the same by the
formula."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.families.blocksparse.attention.cases import F64, Shape


class Given(NamedTuple):
    """What a call and the formula are given besides q, k, v and the layout: ``both``, what the call
    alone is, and the formula alone, as functions of what is captured."""

    both: dict
    text: dict
    captured: dict[str, torch.Tensor]
    functions: dict

    @property
    def call(self) -> dict:
        return self.both | self.text | self.captured

    @property
    def formula(self) -> dict:
        return self.both | {n: make(self.captured) for n, make in self.functions.items()}


def option(name: str, shape: Shape, dtype=F64) -> Given:
    """One of NAMES."""
    batch, heads, rows, cols = shape.batch, shape.heads, shape.queries, shape.keys

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=F64).to(dtype)

    lengths = torch.randint(rows // 2, rows, (batch,)), torch.randint(1, cols, (batch,))
    if name == "lengths":
        return Given(dict(zip(("q_lengths", "kv_lengths"), lengths, strict=True)), {}, {}, {})
    if name in BOTH:
        return Given(BOTH[name](lengths), {}, {}, {})
    text, sizes, functions = EXPRESSIONS[name]
    known = {"batch": batch, "head": heads, "row": rows, "col": cols, "one": 1}
    captured = {n: drawn(*(known[axis] for axis in axes)) for n, axes in sizes.items()}
    captured |= {n: captured[n] > -0.5 for n in captured if n == "keep"}
    captured |= {n: (captured[n] > 0).long() for n in captured if n.startswith("of_")}
    return Given({}, text, captured, functions)


BOTH = {
    "plain": lambda lengths: {},
    "scale": lambda lengths: {"scale": -0.3},
    "a scale of ()": lambda lengths: {"scale": torch.tensor(0.7)},
    "causal": lambda lengths: {"causal": True},
    "window": lambda lengths: {"window": (9, 20)},
    "one window": lambda lengths: {"window": 12},
    "causal window": lambda lengths: {"causal": True, "window": (12, 3)},
    "q lengths": lambda lengths: {"q_lengths": lengths[0]},
    "kv lengths": lambda lengths: {"kv_lengths": lengths[1].int()},
    "dropout": lambda lengths: {"dropout_p": 0.3, "seed": 2**40 + 17},
    "a seed of ()": lambda lengths: {"dropout_p": 0.7, "seed": torch.tensor(9)},
}
# The call's expressions, axes of what they read, and the same as functions.
EXPRESSIONS = {
    "bias": (
        {"score": "v + bias"},
        {"bias": ("head", "row", "col")},
        {"score": lambda t: lambda v, b, h, i, j: v + t["bias"]},
    ),
    "a bias of all": (
        {"score": "v + bias"},
        {"bias": ("batch", "head", "row", "col")},
        {"score": lambda t: lambda v, b, h, i, j: v + t["bias"]},
    ),
    "a bias that broadcasts": (
        {"score": "v + bias"},
        {"bias": ("batch", "one", "one", "col")},
        {"score": lambda t: lambda v, b, h, i, j: v + t["bias"]},
    ),
    "a bias in another order": (
        {"score": "v + bias", "axes": {"bias": ("col", "batch")}},
        {"bias": ("col", "batch")},
        {"score": lambda t: lambda v, b, h, i, j: v + t["bias"].T[:, None, None, :]},
    ),
    "slopes": (
        {"score": "v + slope * (col - row)", "axes": {"slope": "head"}},
        {"slope": ("head",)},
        {"score": lambda t: lambda v, b, h, i, j: v + t["slope"][:, None, None] * (j - i)},
    ),
    "gain and cap": (
        {"score": "3 * tanh(gain * v / 3)"},
        {"gain": ()},
        {"score": lambda t: lambda v, b, h, i, j: 3 * torch.tanh(t["gain"] * v / 3)},
    ),
    "mask": (
        {"mask": "row + 2 * head > col"},
        {},
        {"mask": lambda t: lambda b, h, i, j: i + 2 * h > j},
    ),
    "a mask of bools": (
        {"mask": "keep and col != row", "axes": {"keep": ("batch", "col")}},
        {"keep": ("batch", "col")},
        {"mask": lambda t: lambda b, h, i, j: t["keep"][:, None, None, :] & (j != i)},
    ),
    "documents": (
        {"mask": "of_query == of_key", "axes": {"of_query": ("batch", "row"), "of_key": "col"}},
        {"of_query": ("batch", "row"), "of_key": ("col",)},
        {"mask": lambda t: lambda b, h, i, j: t["of_query"][:, None, :, None] == t["of_key"]},
    ),
    "where": (
        {"score": "where(col < 3, sink, v)", "axes": {"sink": "head"}},
        {"sink": ("head",)},
        {"score": lambda t: lambda v, b, h, i, j: torch.where(
            j < 3, t["sink"][:, None, None], v)},
    ),
    "score and mask": (
        {"score": "v * gain + shift", "mask": "batch + row - col != 1",
         "axes": {"gain": ("batch", "row"), "shift": ("head", "col")}},
        {"gain": ("batch", "row"), "shift": ("head", "col")},
        {"score": lambda t: lambda v, b, h, i, j: (
            v * t["gain"][:, None, :, None] + t["shift"][:, None, :]),
         "mask": lambda t: lambda b, h, i, j: b + i - j - 1 != 0},
    ),
}  # fmt: skip
NAMES = (*BOTH, "lengths", *EXPRESSIONS)
