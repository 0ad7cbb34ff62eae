"""Torch-Blocksparse's layers of a block-sparse weight."""

from __future__ import annotations

import math

import torch
from torch import nn

from kernlib.compat.torch_blocksparse.elementwise import checked_order, in_memory
from kernlib.descriptors.base import check_flag, shown, whole
from kernlib.descriptors.epilogues import Bias
from kernlib.families.blocksparse.contents.sizes import checked_count
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import sdd
from kernlib.families.blocksparse.layout import Layout
from kernlib.hints.calls import hinted
from kernlib.nn.block_sparse import growth
from kernlib.nn.block_sparse.conv import BlockSparseConv2d, taps_layout
from kernlib.nn.block_sparse.linear import check_input, describe_layout
from kernlib.nn.block_sparse.weight import BlockSparseModule, checked_dtype
from kernlib.run import run_kernel
from kernlib.runtime.tensors import check_dense, check_layout

ORDERS = ("NHWC", "CHWN")


@hinted
class Linear(BlockSparseModule):
    """``x W + bias`` with a trainable block-sparse W (in_features, out_features).

    - ``in_features``, ``out_features``: multiples of ``block``.
    - ``layout``: a tensor of 0 and 1 [1, in_features / block, out_features / block], that of W as
      it is stored; :class:`kernlib.nn.BlockSparseLinear` has its transpose.
    - ``block``: 16, 32, 64 or 128.
    - ``bench``: nothing. ``bias``, ``device``, ``dtype``: as those of ``nn.Linear``.

    x is (..., in_features), and so is the result with out_features. ``weight`` [nnz, block, block]
    is the parameter, and all that ``state_dict`` holds beside a bias. It is uniform in
    ``±1/sqrt(n)``, where n entries of its column are stored. Raises TypeError and ValueError for
    other arguments.
    """

    persistent = False
    get_extra_state = nn.Module.get_extra_state  # none
    set_extra_state = nn.Module.set_extra_state
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int,
        layout: torch.Tensor,
        bench: bool = False,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        checked_count("in_features", in_features, 0)
        checked_count("out_features", out_features, 0)
        check_flag("bias", bias)
        checked_dtype(dtype)
        super().__init__(_matrix_layout(layout, block, (in_features, out_features), device), dtype)
        self.bench = bench
        # Built here, as Dynamo cannot.
        self._product = BlockSparseMatmul("dds", epilogue=(Bias(),) if bias else ())
        zeros = nn.Parameter(self.weight.new_zeros(out_features)) if bias else None
        self.register_parameter("bias", zeros)
        self.reset_parameters()

    in_features = property(lambda self: self._layout.shape[0], doc="Features of the input.")
    out_features = property(lambda self: self._layout.shape[1], doc="Features of the output.")

    def reset_parameters(self) -> None:
        """Draw weight and bias anew."""
        with torch.no_grad():
            self.weight.uniform_(-1.0, 1.0).mul_(growth.bounds(self._layout, -2))
            if self.bias is not None:
                bound = 1 / math.sqrt(max(1, self.in_features))
                self.bias.uniform_(-bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features). Raises TypeError and ValueError for another
        input."""
        check_dense(("input",), input=input)
        layout, weight, bias = self._here(), self.weight, self.bias
        check_input(input, weight, layout.shape[0])
        lead = input.shape[:-1]
        x = input.flatten(0, -2) if lead else input.unsqueeze(0)
        parameters = {} if bias is None else {"bias": bias}
        y = run_kernel(self._product, layout, x, weight, **parameters)
        if self._candidates is not None and torch.is_grad_enabled():
            y = self._watch(y, x)
        return y.reshape(*lead, layout.shape[1])

    def _candidate_gradient(self, grad, x, candidates: Layout) -> torch.Tensor:
        return sdd(x, grad, candidates, transpose_a=True)

    def to_dense(self) -> torch.Tensor:
        """W (in_features, out_features), differentiable."""
        return self._here().to_dense(self.weight)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        return ", ".join([*parts, f"bias={self.bias is not None}", describe_layout(self._layout)])


BlockSparseLinear = Linear


@hinted
class Conv2d(BlockSparseConv2d):
    """A convolution with a block-sparse weight, as :class:`kernlib.nn.BlockSparseConv2d`.

    - ``in_channels`` C, ``out_channels`` K, ``kernel_size`` R x S, ``padding``, ``stride``: as
      those of ``nn.Conv2d``. ``bias``: False.
    - ``layout``: a tensor of 0 and 1 [K / block, C / block, R, S]. ``block``: 16, 32, 64 or 128.
    - ``order``: "NHWC" or "CHWN", that of the result (N, K, P, Q) in memory.

    ``weight`` [nnz, block, block] holds the blocks by output channel, kernel row, kernel column and
    input channel, and is all that ``state_dict`` holds.

    Raises ValueError for other orders, NotImplementedError for a bias, TypeError and ValueError for
    other arguments.
    """

    persistent = False
    get_extra_state = nn.Module.get_extra_state  # none
    set_extra_state = nn.Module.set_extra_state

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        layout: torch.Tensor,
        block: int,
        padding: int | tuple[int, int] = (0, 0),
        stride: int | tuple[int, int] = (1, 1),
        order: str = "NHWC",
        bias: bool = False,
    ):
        checked_order("order", order, ORDERS)
        check_flag("bias", bias)
        if bias:
            raise NotImplementedError(
                "bias is not supported; kernlib.nn.BlockSparseConv2d(..., "
                "layout=kernlib.nn.taps_layout(layout, block)) has one"
            )
        taps = taps_layout(layout, block)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, bias=False, layout=taps
        )
        self.order = order

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) to (N, K, P, Q)."""
        y = super().forward(input)
        return in_memory(y, self.order) if y.dim() == 4 else y


def _matrix_layout(layout, block: int, shape: tuple[int, int], device) -> Layout:
    """The layout of one matrix of a shape. Raises ValueError for other tensors."""
    by = whole(block)
    grid = tuple(size // by if by else 0 for size in shape)
    if isinstance(layout, torch.Tensor):
        check_layout("layout", layout)
    if not isinstance(layout, torch.Tensor) or tuple(layout.shape) != (1, *grid):
        got = tuple(layout.shape) if isinstance(layout, torch.Tensor) else shown(layout)
        raise ValueError(
            "layout must be a tensor [1, in_features / block, out_features / block] = "
            f"{[1, *grid]}, got {got}"
        )
    result = Layout(layout[0], block, None, device)
    if result.shape != shape:
        raise ValueError(f"in_features and out_features must be multiples of {block}, got {shape}")
    return result
