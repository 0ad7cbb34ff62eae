"""A convolution of images whose trainable weight is stored in blocks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import check_flag, shown
from kernlib.descriptors.epilogues import Bias, Epilogue
from kernlib.families.blocksparse.contents.given import checked_mask
from kernlib.families.blocksparse.contents.sizes import checked_count
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import sdd
from kernlib.families.blocksparse.layout import Layout
from kernlib.hints.calls import hinted
from kernlib.nn import traced
from kernlib.nn.activations import activate, as_activation, as_steps
from kernlib.nn.block_sparse import growth
from kernlib.nn.block_sparse.linear import describe_layout
from kernlib.nn.block_sparse.weight import (
    BlockSparseModule,
    check_kind,
    checked_dtype,
    layout_for,
)
from kernlib.nn.traced import parameters_of, represented
from kernlib.run import run_kernel
from kernlib.runtime.tensors import check_dense
from kernlib.sharding import multiply_

PADDINGS = ("zeros", "reflect", "replicate", "circular")


@hinted
class BlockSparseConv2d(BlockSparseModule):
    """``activation(conv2d(x, W) + bias)`` with a trainable block-sparse W, in place of
    ``nn.Conv2d``: the product of W as a matrix (out_channels, kernel rows * kernel columns *
    in_channels), a column a kernel row, kernel column and channel, and the unfolded image.

    - ``layout``: a :class:`kernlib.blocksparse.Layout` without heads of that matrix, of which the
      layer holds a copy, such as :func:`taps_layout` makes; or the size of its blocks, an int or
      two (rows, columns), of which then a part ``density`` is drawn.
    - ``in_channels``, ``out_channels``, ``kernel_size``, ``stride``, ``padding``, ``dilation``,
      ``groups``, ``bias``, ``padding_mode``, ``device``, ``dtype``: as those of ``nn.Conv2d``;
      ``groups`` must be 1.
    - ``activation``, ``density``, ``capacity``, ``precision``: as those of
      :class:`kernlib.nn.BlockSparseLinear`, as are initialisation, ``state_dict`` and the methods
      that change which blocks are stored.

    x is (N, in_channels, H, W) or (in_channels, H, W), the result as that of ``nn.Conv2d``.
    ``weight`` (capacity, block rows, block columns) is the parameter, in the order of the layout.
    The unfolded image is in memory, kernel rows * kernel columns times as large as x: this layer is
    for what it stores, not for speed. The layer is Torch-Blocksparse's ``Conv2d``.

    Raises NotImplementedError for groups, ValueError for sizes out of range or no multiples of a
    block's, TypeError for arguments of other kinds.

    Example:
        >>> conv = kl.nn.BlockSparseConv2d(16, 32, 3, padding=1, layout=16, density=0.5)
        >>> conv(torch.randn(1, 16, 8, 8)).shape, conv.weight.shape, conv.to_dense().shape
        (torch.Size([1, 32, 8, 8]), torch.Size([9, 16, 16]), torch.Size([32, 16, 3, 3]))
        >>> conv.activation, conv.precision
        ((), None)
        >>> conv.reset_parameters()
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        layout: Layout | int | tuple[int, int],
        activation: str | Epilogue | None = None,
        density: float | None = None,
        capacity: int | None = None,
        precision: str | None = None,
    ):
        if checked_count("groups", groups, 1) != 1:
            raise NotImplementedError(
                f"groups must be 1, got {groups}; blocks along the diagonal of a layout are groups"
            )
        checked_count("in_channels", in_channels, 1)
        checked_count("out_channels", out_channels, 1)
        check_flag("bias", bias)
        checked_dtype(dtype)
        if not isinstance(padding_mode, str) or padding_mode not in PADDINGS:
            listed = ", ".join(PADDINGS)
            raise ValueError(f"padding_mode must be one of {listed}, got {shown(padding_mode)}")
        kernel = _pair("kernel_size", kernel_size, 1)
        strides, dilations = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
        pads = _pads(padding, kernel, strides, dilations)
        shape = out_channels, kernel[0] * kernel[1] * in_channels
        names = "out_channels", "kernel rows * kernel columns * in_channels"
        blocks = layout_for(layout, shape, density, capacity, device, names)
        super().__init__(blocks, dtype, density)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.dilation = kernel, strides, dilations
        self.padding = padding if isinstance(padding, str) else (pads[2], pads[0])
        self.groups, self.padding_mode, self._pads = 1, padding_mode, pads
        self._activation, self._precision = as_activation(activation), precision
        self._steps = as_steps(self._activation)
        # Built here, as Dynamo cannot.
        self._plain, self._biased = self._describe(()), self._describe((Bias(),))
        self._affine = self._describe((Bias(),) if bias else (), ())
        zeros = nn.Parameter(self.weight.new_zeros(out_channels)) if bias else None
        self.register_parameter("bias", zeros)
        self.reset_parameters()

    def _describe(self, bias: tuple, activation: tuple | None = None) -> BlockSparseMatmul:
        epilogue = (*bias, *(self._activation if activation is None else activation))
        return BlockSparseMatmul("dsd", epilogue=epilogue, precision=self._precision)

    activation = property(lambda self: self._activation, doc="Epilogues after the bias.")
    precision = property(lambda self: self._precision, doc="Of float32 in the kernel.")

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, as :class:`kernlib.nn.BlockSparseLinear` does."""
        with torch.no_grad():
            bounds = growth.bounds(self._drawn())
            multiply_(self.weight.uniform_(-1.0, 1.0), bounds)
            if self.bias is not None:
                bound = 1 / math.sqrt(self._layout.shape[1])
                self.bias.uniform_(-bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, in_channels, H, W) to (N, out_channels, H', W'), also without N. Raises TypeError and
        ValueError for another input."""
        if isinstance(input, traced.Proxy):
            return traced.recorded(self, input)
        check_dense(("input",), input=input)
        layout = self._here()
        if is_dynamo_compiling():
            weight, bias = parameters_of(self, ("weight", "bias"))
        else:
            weight, bias = self.weight, self.bias
        self._check_input(input, weight)
        columns, size = self._columns(input if input.dim() == 4 else input.unsqueeze(0))
        parameters = {} if bias is None else {"bias": bias}
        if self._candidates is not None and torch.is_grad_enabled():
            y = run_kernel(self._affine, layout, weight, columns, **parameters)
            y = activate(self._steps, self._watch(y, columns))
        else:
            descriptor = self._biased if parameters else self._plain
            y = run_kernel(descriptor, layout, weight, columns, **parameters)
        y = y.unflatten(-1, size)
        return y if input.dim() == 4 else y.squeeze(0)

    def _check_input(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        channels = self.in_channels
        if input.dim() not in (3, 4) or input.shape[-3] != channels:
            raise ValueError(
                f"input must have shape (N, {channels}, H, W) or ({channels}, H, W), got "
                f"{tuple(input.shape)}"
            )
        check_kind("input", input, weight)

    def _columns(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """The unfolded image (N, kernel rows * kernel columns * channels, H' * W'), and H', W'."""
        if any(self._pads):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = F.pad(x, self._pads, mode)
        taps = self.kernel_size[0] * self.kernel_size[1]
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        rooms = [size - far for size, far in zip(x.shape[-2:], reach, strict=True)]
        if min(rooms) < 1:
            raise ValueError(
                f"input must be as large as the kernel, {tuple(far + 1 for far in reach)}, with "
                f"padding, got {tuple(x.shape[-2:])}"
            )
        size = tuple((room - 1) // s + 1 for room, s in zip(rooms, self.stride, strict=True))
        unfolded = F.unfold(x, self.kernel_size, self.dilation, 0, self.stride)
        unfolded = unfolded.unflatten(1, (self.in_channels, taps)).transpose(1, 2)
        return unfolded.flatten(1, 2), size

    def _candidate_gradient(self, grad, x, candidates: Layout) -> torch.Tensor:
        return sdd(grad, x, candidates, transpose_b=True, precision=self._precision).sum(0)

    def to_dense(self) -> torch.Tensor:
        """W (out_channels, in_channels, kernel rows, kernel columns), as ``nn.Conv2d`` has it,
        differentiable; activation and bias are not in it."""
        matrix = self._here().to_dense(self.weight)
        return matrix.unflatten(1, (*self.kernel_size, self.in_channels)).permute(0, 3, 1, 2)

    __repr__ = represented

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts += [f"stride={self.stride}", f"padding={self.padding!r}"]
        parts += [f"dilation={self.dilation}"] if self.dilation != (1, 1) else []
        parts += [f"bias={self.bias is not None}", describe_layout(self._layout)]
        parts += [f"padding_mode={self.padding_mode!r}"] if self.padding_mode != "zeros" else []
        parts += [f"activation={epilogue}" for epilogue in self._activation]
        parts += [] if self._precision is None else [f"precision={self._precision!r}"]
        return ", ".join(parts)


@hinted
def taps_layout(
    mask: torch.Tensor,
    block: int | tuple[int, int],
    capacity: int | None = None,
    device: torch.device | str | int | None = None,
) -> Layout:
    """The layout of a :class:`BlockSparseConv2d` from a mask over taps, as Torch-Blocksparse has
    it; the order of its values is that of Torch-Blocksparse's too.

    - ``mask``: of 0 and 1 (blocks of output channels, blocks of input channels, kernel rows, kernel
      columns).
    - ``block``, ``capacity``, ``device``: as those of :class:`kernlib.blocksparse.Layout`.

    Raises ValueError for a mask of other dimensions and a block or capacity out of range, TypeError
    for what is no tensor of bools or ints.

    Example:
        >>> layout = kl.nn.taps_layout(torch.ones(2, 1, 3, 3) > 0, 16)  # 32 x 144
        >>> kl.nn.BlockSparseConv2d(16, 32, 3, layout=layout).weight.shape
        torch.Size([18, 16, 16])
    """
    check_dense(("mask",), mask=mask)
    if mask.dim() != 4:
        raise ValueError(
            "mask must be a tensor (blocks of output channels, blocks of input channels, kernel "
            f"rows, kernel columns), got {tuple(mask.shape)}"
        )
    mask = checked_mask(mask.permute(0, 2, 3, 1).flatten(1))
    return Layout(mask, block, capacity, device)


def _pair(name: str, value, least: int) -> tuple[int, int]:
    """Raises TypeError and ValueError for what is neither an int nor two of them."""
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise TypeError(f"{name} must be an int or two of them, got {shown(value)}")
    return checked_count(name, pair[0], least), checked_count(name, pair[1], least)


def _pads(padding, kernel: tuple, strides: tuple, dilations: tuple) -> tuple[int, ...]:
    """Left, right, top, bottom. Raises TypeError and ValueError."""
    if not isinstance(padding, str):
        rows, cols = _pair("padding", padding, 0)
        return cols, cols, rows, rows
    if padding not in ("valid", "same"):
        raise ValueError(f"padding must be 'valid', 'same' or ints, got {shown(padding)}")
    if padding == "valid":
        return 0, 0, 0, 0
    if strides != (1, 1):
        raise ValueError(f"padding='same' needs a stride of 1, got {strides}")
    rows, cols = (d * (k - 1) for d, k in zip(dilations, kernel, strict=True))
    return cols // 2, cols - cols // 2, rows // 2, rows - rows // 2
