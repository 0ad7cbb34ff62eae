"""One process that has all rows, to calls that may be of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Alone:
    """What :class:`kernlib.distributed.communicator.Processes` is of several, of this process
    alone: its checks are all there are, its rows are those of all, and its sums are the totals."""

    rank, size = 0, 1

    def check_device(self, name: str, t: torch.Tensor) -> None:
        """Nothing: no tensor is sent."""

    def checked(self, task: str, texts: Callable[[], dict[str, str]], key=None) -> object:
        """Raises what ``texts`` raises."""
        return texts()

    def agree(self, task: str, texts, sizes: Callable[[], tuple] = tuple, key=None) -> list:
        """The sizes of this process. Raises what its checks raise."""
        self.checked(task, texts, key)
        return [sizes()]

    def gather(self, t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return t

    def total(self, t: torch.Tensor) -> torch.Tensor:
        return t
