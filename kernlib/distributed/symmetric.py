"""Products of a kernel matrix of points with themselves: ``K(x, x) v``, and their gradients.

The matrix is symmetric, so a process's rows of all gradients follow from its own rows of the
matrix, once it has the gradients of all rows of the result. Nothing has to be summed up over
processes, and half the work of a matrix of two sets of points is done.
"""

from __future__ import annotations

import torch

import kernlib
from kernlib.distributed.communicator import Processes
from kernlib.distributed.rows import gathered
from kernlib.families.pairwise.reductions.symmetric import gradients_of_rows


def product(
    descriptor, x: torch.Tensor, v: torch.Tensor, communicator: Processes, sizes, names: dict
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
        points, summands = communicator.gather_several((x, v), sizes)
        return kernlib.kernel_matmul(descriptor, x, points, summands, **names)

    @staticmethod
    def backward(ctx, grad):
        """With g the gradient, ``sum_m,n g_m v_n k_mn`` has by x_m, in either place of k, the
        gradient of ``sum_n (g_m v_n + v_m g_n) k_mn`` by its first one, and by v that is ``K g``.
        """
        descriptor, communicator, sizes, names, keys = ctx.request
        x, v, *values = ctx.saved_tensors
        all_needs = ctx.needs_input_grad[5:]
        needs_x, needs_v, *needs = all_needs
        communicator.agree("gradients", lambda: {"needs": str(all_needs)}, key=lambda: all_needs)
        again = torch.is_grad_enabled()  # whether gradients of gradients are asked for
        points, summands, grads = gathered(communicator, sizes, x, v, grad)
        if not needs_x and not any(needs):
            by_v = kernlib.kernel_matmul(descriptor, x, points, grads, **names)
            return *(None,) * 6, by_v, *(None for _ in values)
        if not again:
            wanting = [keys[place] for place, need in enumerate(needs) if need]
            wanting += [name for name, need in (("a", needs_x), ("v", needs_v)) if need]
            names = names | dict(zip(keys, values, strict=True))
            pairs = (x, points), (v, summands), (grad, grads)
            by = gradients_of_rows(
                descriptor, *pairs, wanting, names.pop("row_offset"), names.pop("col_offset"), names
            )
            return *(None,) * 5, *(by.get(name) for name in ("a", "v", *keys))
        with torch.enable_grad():
            place = x.view_as(x) if needs_x else x.detach().requires_grad_()
            both = torch.cat([summands, grads], 1), torch.cat([grad, v], 1)
            names = names | dict(zip(keys, values, strict=True))
            part = kernlib.kernel_matmul(descriptor, place, points, both[0], **names)
            inputs = [place, *(t for t, need in zip(values, needs, strict=True) if need)]
            by_x, *others = torch.autograd.grad(part, inputs, both[1], create_graph=True)
        by_v = part[:, summands.shape[1] :]
        halves = iter([grad / 2 for grad in others])  # each pair counts from both of its points
        by_values = [next(halves) if need else None for need in needs]
        return *(None,) * 5, by_x, by_v, *by_values
