"""Products of a kernel matrix of points with themselves: ``K(x, x) v``, and their gradients.

The matrix is symmetric, so a process's rows of all gradients follow from its own rows of the
matrix, once it has the gradients of all rows of the result. Nothing has to be summed up over
processes, and half the work of a matrix of two sets of points is done.
"""

from __future__ import annotations

import torch

import kernlib
from kernlib.distributed.communicator import Communicator, Facts
from kernlib.distributed.rows import gathered
from kernlib.families.pairwise.reductions import arguments, gradients
from kernlib.runtime.dtypes import accumulator


def product(
    descriptor, x: torch.Tensor, v: torch.Tensor, communicator: Communicator, sizes, names: dict
) -> torch.Tensor:
    """This process's rows of ``K(x, x) v``, where each process has so many of ``sizes`` rows of x
    and of v (N_r, C)."""
    keys = [name for name, value in names.items() if isinstance(value, torch.Tensor)]
    values = [names[key] for key in keys]
    return _Product.apply(descriptor, communicator, tuple(sizes), names, keys, x, v, *values)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, communicator, sizes, names, keys, x, v, *values):
        ctx.request = descriptor, communicator, sizes, names, keys
        ctx.save_for_backward(x, v, *values)
        points, summands = (communicator.gather(t, sizes) for t in (x, v))
        return kernlib.kernel_matmul(descriptor, x, points, summands, **names)

    @staticmethod
    def backward(ctx, grad):
        """With g the gradient, ``sum_m,n g_m v_n k_mn`` has by x_m, in either place of k, the
        gradient of ``sum_n (g_m v_n + v_m g_n) k_mn`` by its first one, and by v that is ``K g``.
        """
        descriptor, communicator, sizes, names, keys = ctx.request
        x, v, *values = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad[5:]
        communicator.agree("gradients", lambda: Facts({"needs": str((needs_x, *needs))}, ()))
        again = torch.is_grad_enabled()  # whether gradients of gradients are every for
        points, summands, grads = (gathered(t, communicator, sizes) for t in (x, v, grad))
        if not needs_x and not any(needs):
            by_v = kernlib.kernel_matmul(descriptor, x, points, grads, **names)
            return *(None,) * 6, by_v, *(None for _ in values)
        both = torch.cat([summands, grads], 1), torch.cat([grad, v], 1)
        by_names = [key for key, need in zip(keys, needs, strict=True) if need]
        call = descriptor, x, points, both[0], names | dict(zip(keys, values, strict=True))
        if not again and _is_plain(names):
            by_x, partial, *others = _at_once(*call, by_names, both[1])
            by_v = communicator.scatter_sum(partial[:, : v.shape[1]].contiguous(), sizes)
        else:
            by_x, by_v, *others = _recorded(*call, by_names, both[1], again)
        halves = iter([grad / 2 for grad in others])  # each pair counts from both of its points
        by_values = [next(halves) if need else None for need in needs]
        return *(None,) * 5, by_x, by_v, *by_values


def _is_plain(names: dict) -> bool:
    """Whether hyperparameters reach kernels as they are, without a map of the points or a unit."""
    width = names.get("bandwidth", 1.0)
    is_usual = isinstance(width, torch.Tensor) or 1e-18 <= width <= 1e18
    return is_usual and not any(name in names for name in ("feature_map", "lengthscale"))


def _at_once(descriptor, x, points, columns, names: dict, by_names: list[str], weights) -> tuple:
    """The gradients by x, by the columns as sums over this process's rows, and by hyperparameters,
    in one pass."""
    names = dict(names)
    offsets = names.pop("row_offset"), names.pop("col_offset")
    request = arguments.request_of(descriptor, x, points, columns, *offsets, names)
    shape = arguments.shape_of(request)
    weights = weights.to(accumulator(x.dtype))[None]
    with torch.no_grad():
        every = ["a", "v", *by_names]
        grads = gradients.gradients("matmul", request, shape, every, weights, None)
    return tuple(grads[name] for name in every)


def _recorded(
    descriptor, x, points, columns, names: dict, by_names: list[str], weights, again: bool
) -> tuple:
    """The gradients by x, by v, and by hyperparameters, which can be differentiated themselves if
    ``again``."""
    with torch.enable_grad():
        leaves = {
            name: value if again else value.detach().requires_grad_(value.requires_grad)
            for name, value in names.items()
            if isinstance(value, torch.Tensor)
        }
        place = x.view_as(x) if again else x.detach().requires_grad_()
        part = kernlib.kernel_matmul(descriptor, place, points, columns, **names | leaves)
        inputs = [place, *(leaves[name] for name in by_names)]
        by_x, *others = torch.autograd.grad(part, inputs, weights, create_graph=again)
    by_v = part[:, columns.shape[1] // 2 :]
    return by_x, by_v if again else by_v.detach(), *others
