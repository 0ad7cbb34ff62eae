"""torch.vmap of the operators of kernel matrices: the mapped axis becomes part of their batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.runtime.arguments import tensors_of

MATRIX, NUMBER = 2, 0  # dimensions of one entry of the batch


class Entry(NamedTuple):
    """A tensor of a mapped call, the axis that is mapped over, None for none, and the dimensions
    that it has without a batch."""

    tensor: torch.Tensor
    axis: int | None
    own: int

    def leading(self) -> torch.Tensor:
        """The tensor with the mapped axis and the call's own batch in front, each of size 1 if
        there is none."""
        t = self.tensor[None] if self.axis is None else self.tensor.movedim(self.axis, 0)
        return t if t.dim() == 2 + self.own else t.unsqueeze(1)

    @property
    def is_batched(self) -> bool:
        """Whether the call has a batch of its own."""
        return self.tensor.dim() - (self.axis is not None) > self.own


class Batch(NamedTuple):
    """The batch of one call for all: ``mapped`` times ``inner``, that of each, if they have one."""

    mapped: int
    inner: int | None

    @classmethod
    def of(cls, mapped: int, entries: list[Entry]) -> Batch:
        sizes = [entry.leading().shape[1] for entry in entries if entry.is_batched]
        return cls(mapped, max(sizes) if sizes else None)

    def placed(self, one: Entry) -> torch.Tensor:
        """A tensor for the one call. One that is neither mapped nor batched broadcasts."""
        if one.axis is None and not one.is_batched:
            return one.tensor
        t = one.leading()
        if self.inner is None:
            return t.squeeze(1)
        return t.expand(self.mapped, self.inner, *t.shape[2:]).flatten(0, 1)

    def restored(self, result: torch.Tensor, own: int) -> torch.Tensor:
        """A result of the one call, of ``own`` dimensions without a batch, the mapped axis
        first."""
        inner = () if self.inner is None else (self.inner,)
        return result.reshape(self.mapped, *inner, *result.shape[result.dim() - own :])


def spread(size: int, points: list, values: dict, dims: list | None) -> tuple:
    """The batch of ``size`` mapped calls, and their points, each with its axis and None or not, and
    hyperparameters, of which tensors have the axes ``dims``, as one call takes them."""
    tensors = tensors_of(values)
    axes = dims or [None] * len(tensors)
    entries = [None if t is None else Entry(t, axis, MATRIX) for t, axis in points]
    entries += [Entry(t, axis, NUMBER) for t, axis in zip(tensors.values(), axes, strict=True)]
    batch = Batch.of(size, [entry for entry in entries if entry is not None])
    spread = [None if entry is None else batch.placed(entry) for entry in entries]
    placed, numbers = spread[: len(points)], spread[len(points) :]
    if all(t is None or t.dim() == MATRIX for t in placed):  # beside which (L,) may be of points
        placed[0] = placed[0][None]
    return batch, placed, values | dict(zip(tensors, numbers, strict=True))
