"""Batches of more matrices than libraries of CUDA take in one call: in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# A grid has at most 65,535 blocks in two of its dimensions, and cuSOLVER and cuBLAS spend one of
# these on the batch; beyond they fail, with an internal error or without a word.
MOST = 32_768


def is_limited(t: torch.Tensor) -> bool:
    """Whether those libraries compute with a tensor."""
    return t.is_cuda


def by_parts(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """``function(*tensors)``, which answers a tensor or several, or writes in place and answers
    None. All tensors have one batch in front, that of the first without its last two dimensions."""
    batch = tensors[0].shape[:-2]
    count = batch.numel()
    if count <= MOST or not is_limited(tensors[0]):
        return function(*tensors)
    flat = [t.reshape(count, *t.shape[len(batch) :]).split(MOST) for t in tensors]
    parts = [function(*part) for part in zip(*flat, strict=True)]
    if parts[0] is None:
        return None
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts).unflatten(0, batch)
    return tuple(torch.cat(each).unflatten(0, batch) for each in zip(*parts, strict=True))
