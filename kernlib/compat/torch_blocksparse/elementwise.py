"""Torch-Blocksparse's ReLU of a sum, and its change of the order of images in memory."""

from __future__ import annotations

import torch
from torch import nn

from kernlib.descriptors.base import shown
from kernlib.hints.calls import hinted
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.tensors import check_dense

AXES = "NCHW"


class ReLU(nn.Module):
    """``relu(x * scale + bias + residual)``, called ``op(x, scale, bias, residual)`` with tensors
    of shape (1,) or () for scale and bias, which have gradients too and are not looked at from the
    host. float16 and bfloat16 are computed in float32 and rounded once. Raises TypeError for what
    is no tensor, ValueError for a scale or bias of several numbers."""

    def forward(
        self,
        x: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """The result, of x's shape and dtype."""
        tensors = {"x": x, "scale": scale, "bias": bias, "residual": residual}
        check_dense(tuple(tensors), **tensors)
        for name in ("scale", "bias"):
            if tensors[name].numel() != 1:
                raise ValueError(f"{name} must be one number, got {tuple(tensors[name].shape)}")
        for name, t in tensors.items():
            if t.device != x.device:
                raise ValueError(f"{name} must be on the device of x, {x.device}, got {t.device}")
        if residual.shape != x.shape:
            raise ValueError(
                f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}"
            )
        wide = accumulator(x.dtype)
        scale, bias = scale.to(wide).reshape(()), bias.to(wide).reshape(())
        return torch.relu(x.to(wide) * scale + bias + residual.to(wide)).to(x.dtype)


@hinted
class Permute(nn.Module):
    """The tensor (N, C, H, W) with its values in another order in memory, called ``op(x)``.

    ``in_order`` and ``out_order`` are the letters N, C, H and W, that of stride 1 last, such as
    "NCHW" and "CHWN". The result has x's shape and values, a new tensor in ``out_order``; its
    gradient by x is in ``in_order``. Raises ValueError for other orders, and for x of another
    number of dimensions, TypeError for what is no tensor.
    """

    def __init__(self, in_order: str, out_order: str):
        super().__init__()
        self.in_order = checked_order("in_order", in_order)
        self.out_order = checked_order("out_order", out_order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x in ``out_order``."""
        check_dense(("x",), x=x)
        if x.dim() != 4:
            raise ValueError(f"x must have shape (N, C, H, W), got {tuple(x.shape)}")
        return _Permute.apply(x, self.in_order, self.out_order)

    def extra_repr(self) -> str:
        return f"{self.in_order!r}, {self.out_order!r}"


class _Permute(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, in_order, out_order):
        return in_memory(x, out_order)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, in_order, out_order = inputs
        ctx.orders = out_order, in_order

    @staticmethod
    def backward(ctx, grad):
        return _Permute.apply(grad, *ctx.orders), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return in_memory(tangent, ctx.orders[0])


def in_memory(x: torch.Tensor, order: str) -> torch.Tensor:
    """A copy of (N, C, H, W) whose memory has its dimensions in an order."""
    there = [AXES.index(letter) for letter in order]
    back = [order.index(letter) for letter in AXES]
    return x.permute(there).clone(memory_format=torch.contiguous_format).permute(back)


def checked_order(name: str, order: object, choices: tuple[str, ...] | None = None) -> str:
    """Raises ValueError for what is no order of the four letters, or none of those known."""
    if choices is None:
        right = isinstance(order, str) and sorted(order) == sorted(AXES)
        expected = "an order of N, C, H and W, such as 'CHWN'"
    else:
        right, expected = order in choices, " or ".join(choices)
    if not right:
        raise ValueError(f"{name} must be {expected}, got {shown(order)}")
    return order
