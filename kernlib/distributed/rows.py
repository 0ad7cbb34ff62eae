"""Rows that are spread over processes, with gradients: gathered, and summed back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib.distributed.communicator import Processes, as_communicator
from kernlib.runtime.tensors import check_dense

if TYPE_CHECKING:
    from kernlib.distributed.communicator import Group


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Replica(NamedTuple):
    """Rows of all processes, by rank, in every process: what :func:`replicate` returns, and calls
    take in place of the rows of each, which they then need not gather.

    - ``tensor``: all rows; ``sizes``: how many each process had.
    """

    tensor: torch.Tensor
    sizes: tuple[int, ...]


def replicate(t: torch.Tensor, *, group: Group = None) -> Replica:
    """Gather the rows of all processes once, for several calls.

    - ``t`` (N_r, ...): the rows of this process, any number of them, of one dtype and of equal
      further dimensions in all processes.
    - ``group``: as that of :func:`kernlib.distributed.kernel_matmul`.

    Differentiable, if t requires a gradient in all processes: each gets the sum over processes of
    its own rows' gradients.

    Raises TypeError and ValueError, in all processes, for tensors that do not fit.

    Example:
        >>> points = kl.distributed.replicate(x)  # doctest: +SKIP
    """
    communicator = as_communicator(group)

    def texts() -> dict[str, str]:
        check_dense(("t",), t=t)
        communicator.check_device("t", t)
        if not t.dim():
            raise ValueError("t must have rows, got a tensor without dimensions")
        return rows_texts("t", t)

    every = communicator.agree("replicate", texts, lambda: (t.shape[0],), lambda: rows_key(t))
    sizes = tuple(rows for (rows,) in every)
    return Replica(*gathered(communicator, sizes, t), sizes)


def rows_texts(name: str, t: torch.Tensor) -> dict[str, str]:
    """What must be equal in all processes of tensors of rows."""
    return {
        f"dtype of {name}": str(t.dtype),
        f"dimensions of {name} but the rows'": str(tuple(t.shape[1:])),
        f"device type of {name}": t.device.type,
        f"requires_grad of {name}": str(t.requires_grad and torch.is_grad_enabled()),
    }


def rows_key(t: torch.Tensor) -> tuple:
    """What checks and texts of rows depend on. Raises TypeError for what is no plain tensor."""
    if type(t) not in _PLAIN:
        raise TypeError(f"no plain tensor: {type(t)}")
    requires_grad = t.requires_grad and torch.is_grad_enabled()
    return t.dim(), t.shape[1:], t.dtype, t.device, t.layout, requires_grad


def value_key(value: object) -> tuple:
    """The same of a hyperparameter, which is a number or a tensor of the same in all processes."""
    if not isinstance(value, torch.Tensor):
        return (repr(value),)  # 1, 1.0 and True are equal, and not the same to checks
    return said(value), *rows_key(value)


def said(value: object) -> str:
    """A hyperparameter as all processes must have it. Values on a GPU are not looked at, for which
    the host would wait."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    wants = value.requires_grad and torch.is_grad_enabled()
    text = f"{value.dtype} {tuple(value.shape)} requires_grad={wants}"
    if value.device.type != "cpu":
        return text
    if value.numel() < 9:
        return f"{text} {value.detach().flatten().tolist()}"
    content = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{text} {hashlib.sha256(content).hexdigest()[:16]}"


def autocast_of(t: torch.Tensor) -> str:
    """What autocast makes of products of tensors like one, "off" without."""
    kind = t.device.type
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"


def gathered(
    communicator: Processes, sizes: Sequence[int], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The rows of all processes of each tensor, by one exchange. The gradients sum up those that
    all of them have by this process's rows."""
    if communicator.size == 1:
        return tensors
    return _Gathered.apply(communicator, tuple(sizes), *tensors)


def replicated(t: torch.Tensor, communicator: Processes) -> torch.Tensor:
    """A tensor that is the same in all processes, whose gradient is the sum of all of theirs."""
    if communicator.size == 1 or not t.requires_grad:
        return t
    return _Replicated.apply(t, communicator)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, communicator, sizes, *tensors):
        ctx.request = communicator, sizes
        return _marked(ctx, communicator.gather_several(tensors, sizes))

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[2:]
        needed = [grad for grad, need in zip(grads, needs, strict=True) if need]
        sums = iter(_ScatterSum.apply(*ctx.request, *needed))
        return None, None, *(next(sums) if need else None for need in needs)


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, communicator, sizes, *tensors):
        ctx.request = communicator, sizes

        _agree_on_gradients(communicator, tensors)
        return _marked(ctx, communicator.scatter_sum(tensors, sizes))

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[2:]
        needed = [grad for grad, need in zip(grads, needs, strict=True) if need]
        rows = iter(_Gathered.apply(*ctx.request, *needed))
        return None, None, *(next(rows) if need else None for need in needs)


def _marked(ctx, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results that take no gradient where their tensors do not."""
    pairs = zip(results, ctx.needs_input_grad[2:], strict=True)
    ctx.mark_non_differentiable(*(t for t, need in pairs if not need))
    return tuple(results)


def _agree_on_gradients(communicator: Processes, tensors: Sequence[torch.Tensor]) -> None:
    def texts() -> dict[str, str]:
        named = {"gradients": str(len(tensors))}
        for place, t in enumerate(tensors):
            named |= rows_texts(f"gradient {place}", t)
        return named

    communicator.agree("gradients", texts, key=lambda: tuple([rows_key(t) for t in tensors]))


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, communicator):
        ctx.communicator = communicator
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return _Total.apply(grad, ctx.communicator), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, communicator):
        ctx.communicator = communicator
        _agree_on_gradients(communicator, [t])
        return communicator.total(t)

    @staticmethod
    def backward(ctx, grad):
        return _Total.apply(grad, ctx.communicator), None
