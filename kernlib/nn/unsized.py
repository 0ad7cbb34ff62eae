"""A tensor in the place of one whose size only a file knows."""

from __future__ import annotations

import torch
from torch._C import _disabled_torch_function_impl


class Unsized(torch.Tensor):
    """An empty tensor of bytes. Loaders compare the size of what a file holds with that of the
    tensor in whose place it goes: this one's is equal to that of any vector, and as
    ``torch.distributed.checkpoint`` then reads into the tensor, it has that size from then on."""

    __torch_function__ = _disabled_torch_function_impl  # results are plain tensors

    @classmethod
    def on(cls, place: torch.device) -> torch.Tensor:
        """A new one; a plain one inside of modes whose tensors are of classes of their own."""
        tensor = torch.empty(0, dtype=torch.uint8, device=place)
        return tensor.as_subclass(cls) if type(tensor) is torch.Tensor else tensor

    def size(self, dim: int | None = None):
        size = super().size()
        if size[0] or dim is not None:
            return size if dim is None else size[dim]
        return _AnySize(self)

    @property
    def shape(self):
        return self.size()

    def __deepcopy__(self, memo: dict) -> Unsized:
        return self.clone().as_subclass(Unsized)

    def __reduce_ex__(self, protocol: int):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self.as_subclass(torch.Tensor))


class _AnySize:
    """The size of an :class:`Unsized` tensor. No tuple, which would compare itself."""

    def __init__(self, tensor: Unsized):
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or len(other) != 1:
            return False
        self._tensor.resize_(other)
        return True

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 1

    def __iter__(self):
        return iter(torch.Tensor.size(self._tensor))

    def __getitem__(self, index):
        return torch.Tensor.size(self._tensor)[index]

    def __repr__(self) -> str:
        return "(any)"


def is_unfilled(value: object) -> bool:
    """Whether a tensor of a state_dict is still unfilled."""
    return isinstance(value, torch.Tensor) and value.numel() == 0
