"""Weights of a formula, exact in every dtype: what ``write_files.py`` has libraries store, and what
the tests expect to read."""

from __future__ import annotations

import math
import zlib

import torch

HALF = torch.float16
# Of the model of write_files.py, and which of its weights are pruned.
HIDDEN, INNER, VOCABULARY = 16, 24, 20
_LAYER = "model.layers.0."
_SQUARE = {f"{_LAYER}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
_MLP = {
    f"{_LAYER}mlp.gate_proj.weight": (INNER, HIDDEN),
    f"{_LAYER}mlp.up_proj.weight": (INNER, HIDDEN),
    f"{_LAYER}mlp.down_proj.weight": (HIDDEN, INNER),
}
PRUNED = {**_SQUARE, **_MLP}
DENSE = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    f"{_LAYER}input_layernorm.weight": (HIDDEN,),
    f"{_LAYER}post_attention_layernorm.weight": (HIDDEN,),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
# Of files without a model: rows of which one is empty, columns that fill no byte, a vector, four
# dimensions.
ODD = {
    "first.weight": (5, 13),
    "second.weight": (1, 8),
    "third.weight": (7,),
    "fourth.weight": (3, 2, 2, 5),
    "fifth.weight": (4, 0),
}


def filled(name: str, shape: tuple[int, ...], dtype: torch.dtype = HALF) -> torch.Tensor:
    """Multiples of 1/16 between -4 and 4, none of which is zero."""
    steps = torch.arange(math.prod(shape), dtype=torch.int64) * 7919 + zlib.crc32(name.encode())
    steps = steps % 128 - 64
    return ((steps + (steps >= 0)) / 16).to(dtype).reshape(shape)


def pruned(name: str, shape: tuple[int, ...], dtype: torch.dtype = HALF) -> torch.Tensor:
    """A third of :func:`filled`, without the second row where there are two."""
    places = torch.arange(math.prod(shape), dtype=torch.int64) * 31 + len(name)
    values = filled(name, shape, dtype) * (places % 9 < 3).reshape(shape)
    if len(shape) > 1 and shape[0] > 1:
        values[1] = 0
    return values + 0  # no negative zeros


def pruned_24(name: str, shape: tuple[int, ...], dtype: torch.dtype = HALF) -> torch.Tensor:
    """2 of each 4, in every eighth 1 and in some 0."""
    values = filled(name, shape, dtype).flatten()
    groups = torch.arange(len(values) // 4, dtype=torch.int64)
    first = (groups * 5 + len(name)) % 4
    second = (first + 1 + groups % 3) % 4
    mask = torch.zeros(len(groups), 4, dtype=torch.bool)
    mask[groups[groups % 16 != 3], first[groups % 16 != 3]] = True
    mask[groups[groups % 8 != 3], second[groups % 8 != 3]] = True
    return (values * mask.flatten() + 0).reshape(shape)


def model_values(prune=pruned) -> dict[str, torch.Tensor]:
    """What the model holds, its weights pruned by a function of this module."""
    values = {name: prune(name, shape) for name, shape in PRUNED.items()}
    return values | {name: filled(name, shape) for name, shape in DENSE.items()}
