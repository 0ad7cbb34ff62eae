"""A linear layer whose trainable weight is stored in blocks, and what swaps the layers of a model
for such."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import check_flag
from kernlib.descriptors.epilogues import Bias, Epilogue
from kernlib.families.blocksparse.contents.sizes import checked_count
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import sdd
from kernlib.families.blocksparse.layout import Layout
from kernlib.hints.calls import former, hinted
from kernlib.nn import traced
from kernlib.nn.activations import activate, as_activation, as_steps
from kernlib.nn.block_sparse import growth
from kernlib.nn.block_sparse.weight import (
    BlockSparseModule,
    blocks_of,
    check_kind,
    check_multiple,
    check_options,
    checked_dtype,
    layout_for,
    layout_of_weight,
)
from kernlib.nn.linears import (
    check_model,
    checked_linear,
    checked_match,
    dense_linear,
    swap,
)
from kernlib.nn.traced import parameters_of, represented
from kernlib.run import run_kernel
from kernlib.runtime.tensors import check_dense
from kernlib.sharding import multiply_


@hinted
class BlockSparseLinear(BlockSparseModule):
    """``activation(x W^T + bias)`` with a trainable block-sparse ``W`` (out_features, in_features),
    in place of ``nn.Linear``.

    - ``layout``: a :class:`kernlib.blocksparse.Layout` without heads of that matrix, of which the
      layer holds a copy; or the size of its blocks, an int or two (rows, columns), of which then a
      part ``density`` is drawn by torch's generator of the CPU.
    - ``in_features``, ``out_features``: multiples of a block's columns and rows.
    - ``bias``: whether there is one.
    - ``device``, ``dtype``: as those of ``nn.Linear``, the device by default the layout's; float16,
      bfloat16, float32 or float64.
    - ``activation``: ``"relu"``, ``"gelu"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``,
      ``"leaky_relu"``, or epilogues without arguments such as ``kernlib.Gelu("tanh")``, in the same
      kernel.
    - ``density``, ``capacity``: with a size of blocks, the part of all that is stored, and for how
      many there is room if that is more.
    - ``precision``: of float32, as in :class:`kernlib.BlockSparseMatmul`.

    x is (..., in_features), of any number of dimensions from one on. ``weight`` (capacity, block
    rows, block columns) is the parameter, in the order of the layout; see :meth:`to_dense`. A new
    weight is uniform in ``±1/sqrt(n)``, where n of its row's entries are stored: that is
    ``nn.Linear``'s Kaiming initialisation with the fan-in of what is there, so that outputs have
    the variance of ``nn.Linear``'s; the bias is uniform in ``±1/sqrt(in_features)``.

    ``state_dict`` holds the layout as tensors, which are looked at when it is loaded, into a layer
    of the same sizes, blocks and capacity. On "meta" a layer has no contents: what comes from there
    by ``to_empty`` raises RuntimeError until a state is loaded, :meth:`update_` is called or, with
    ``density``, :meth:`reset_parameters`. :meth:`drop_`, :meth:`regrow_` and :meth:`update_` change
    in place which blocks are stored. The layout's tensors are neither parameters nor buffers.

    The layer is Torch-Blocksparse's ``Linear``.

    Raises ValueError for sizes that are no multiple of a block's or not the layout's, and for a
    density or capacity out of range, TypeError for arguments of other kinds.

    Example:
        >>> layer = kl.nn.BlockSparseLinear(64, 32, 16, density=0.5, activation="relu")
        >>> layer(torch.randn(7, 64)).shape, layer.weight.shape, layer.to_dense().shape
        (torch.Size([7, 32]), torch.Size([4, 16, 16]), torch.Size([32, 64]))
        >>> layer.in_features, layer.out_features, layer.activation, layer.precision
        (64, 32, (Relu(),), None)
        >>> layer.reset_parameters()
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout | int | tuple[int, int],
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | Epilogue | None = None,
        density: float | None = None,
        capacity: int | None = None,
        precision: str | None = None,
    ):
        self._check(in_features, out_features, bias, dtype)
        mine = layout_for(layout, (out_features, in_features), density, capacity, device)
        self._begin(mine, bias, dtype, activation, precision, density)
        self.reset_parameters()

    @staticmethod
    def _check(in_features, out_features, bias, dtype) -> None:
        checked_count("in_features", in_features, 0)
        checked_count("out_features", out_features, 0)
        check_flag("bias", bias)
        checked_dtype(dtype)

    def _begin(
        self, layout: Layout, bias: bool, dtype, activation, precision, density=None
    ) -> None:
        """Everything but values."""
        super().__init__(layout, dtype, density)
        self._activation, self._precision = as_activation(activation), precision
        steps = as_steps(self._activation)
        self._steps = steps
        # Built here, as Dynamo cannot.
        self._plain, self._biased = self._describe(()), self._describe((Bias(),))
        self._affine = self._describe((Bias(),) if bias else (), ())
        zeros = nn.Parameter(self.weight.new_zeros(layout.shape[0])) if bias else None
        self.register_parameter("bias", zeros)

    def _describe(self, bias: tuple, activation: tuple | None = None) -> BlockSparseMatmul:
        epilogue = (*bias, *(self._activation if activation is None else activation))
        return BlockSparseMatmul(
            "dds", transpose_b=True, epilogue=epilogue, precision=self._precision
        )

    @classmethod
    @former("density", "criterion", "per")
    def from_linear(
        cls,
        linear: nn.Linear,
        block: int | tuple[int, int],
        *,
        density: float = 1.0,
        criterion: str = "magnitude",
        per: str = "matrix",
        activation: str | Epilogue | None = None,
        capacity: int | None = None,
        precision: str | None = None,
    ) -> BlockSparseLinear:
        """The layer with the blocks of the weight of ``linear`` that stay, and copies of its bias,
        dtype, device, mode and of what requires a gradient.

        - ``block``: an int, or two (rows, columns).
        - ``density``: the part of all blocks that stays: exactly ``round(density * n)`` of n.
        - ``criterion``: ``"magnitude"`` keeps those of largest Frobenius norm, of equal ones the
          first, ``"random"`` draws them.
        - ``per``: ``"matrix"`` counts over all blocks, ``"row"`` over each row of blocks, which
          then hold as many each.
        - ``capacity``: for how many blocks there is room, if that is more.
        - ``activation``, ``precision``: as those of the layer.

        Of a weight on "meta" it is a layer there, of the blocks that a state fills it with, or that
        :meth:`reset_parameters` draws behind ``to_empty``.

        What a parametrization computes is taken as the next call in evaluation would. Nothing
        waits for a GPU. Raises TypeError for what is no ``nn.Linear`` of these dtypes,
        ValueError for sizes that are no multiple of a block's, a weight without values, and other
        arguments.

        Example:
            >>> linear = torch.nn.Linear(64, 32)
            >>> layer = kl.nn.BlockSparseLinear.from_linear(linear, 16, density=0.25)
            >>> layer.layout.density, layer.to_linear().weight.count_nonzero()
            (0.25, tensor(512))
        """
        linear = check_linear(linear)
        weight = linear.weight
        layout = layout_of_weight(weight, block, density, criterion, per, capacity)
        layer = cls.__new__(cls)
        # What a layer on meta draws, unless a state fills it.
        blocks = blocks_of(layout.grid, density, per) if weight.is_meta else 0
        drawn = blocks / max(1, growth.total(layout)) if weight.is_meta else None
        layer._begin(layout, linear.bias is not None, weight.dtype, activation, precision, drawn)
        with torch.no_grad():
            if not weight.is_meta:
                layer.weight.copy_(layout.to_blocks(weight.detach()))
            if linear.bias is not None:
                layer.bias.copy_(linear.bias)
                layer.bias.requires_grad_(linear.bias.requires_grad)
        layer.weight.requires_grad_(weight.requires_grad)
        return layer.train(linear.training)

    in_features = property(lambda self: self._layout.shape[1], doc="Features of the input.")
    out_features = property(lambda self: self._layout.shape[0], doc="Features of the output.")
    activation = property(lambda self: self._activation, doc="Epilogues after the bias.")
    precision = property(lambda self: self._precision, doc="Of float32 in the kernel.")

    def reset_parameters(self) -> None:
        """Draw weight and bias anew; of a layer that comes from meta, and was made with a density,
        also which blocks are stored."""
        with torch.no_grad():
            bounds = growth.bounds(self._drawn())
            multiply_(self.weight.uniform_(-1.0, 1.0), bounds)
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
                self.bias.uniform_(-bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features). Raises TypeError and ValueError for another
        input."""
        if type(input) is not torch.Tensor and (result := traced.called(self, input)) is not None:
            return result
        check_dense(("input",), input=input)
        layout = self._here()
        if is_dynamo_compiling():
            weight, bias = parameters_of(self, ("weight", "bias"))
        else:
            weight, bias = self.weight, self.bias
        check_input(input, weight, layout.shape[1])
        # Dynamo cannot ask a tensor for that, and hands no such tensor to a program that records.
        if not is_dynamo_compiling() and torch.is_grad_enabled() and input.is_inference():
            input = input.clone()  # it may be kept for a gradient
        lead = input.shape[:-1]
        x = input
        if len(lead) != 1:
            x = input.flatten(0, -2) if lead else input.unsqueeze(0)
        operands = {} if bias is None else {"bias": bias}
        if self._candidates is not None and torch.is_grad_enabled():
            y = run_kernel(self._affine, layout, x, weight, **operands)
            y = activate(self._steps, self._watch(y, x))
        else:
            descriptor = self._biased if operands else self._plain
            y = run_kernel(descriptor, layout, x, weight, **operands)
        return y if len(lead) == 1 else y.reshape(*lead, layout.shape[0])

    def _candidate_gradient(self, grad, x, candidates: Layout) -> torch.Tensor:
        return sdd(grad, x, candidates, transpose_a=True, precision=self._precision)

    def to_dense(self) -> torch.Tensor:
        """W (out_features, in_features), differentiable; activation and bias are not in it."""
        return self._here().to_dense(self.weight)

    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` of the same matrix and bias, which are copied; the activation is not in
        it."""
        return dense_linear(self, self.to_dense())

    __repr__ = represented

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"bias={self.bias is not None}", describe_layout(self._layout)]
        parts += [f"activation={epilogue}" for epilogue in self._activation]
        parts += [] if self._precision is None else [f"precision={self._precision!r}"]
        return ", ".join(parts)


def describe_layout(layout: Layout) -> str:
    """What a layer shows of its layout; how dense that is takes a look at a GPU."""
    parts = [f"block={layout.block}", f"capacity={layout.capacity}"]
    parts += [] if layout.device.type == "meta" else [f"density={layout.density:.3g}"]
    return ", ".join(parts)


def check_input(input: torch.Tensor, weight: torch.Tensor, features: int) -> None:
    """Raises TypeError and ValueError for what a linear layer does not take."""
    if input.dim() == 0 or input.shape[-1] != features:
        raise ValueError(f"input must have shape (..., {features}), got {tuple(input.shape)}")
    check_kind("input", input, weight)


@hinted
@former("density", "match", "criterion", "per", "precision", filter="match")
def block_sparsify(
    model: nn.Module,
    block: int | tuple[int, int],
    *,
    match: str | re.Pattern[str] | Callable[[str, nn.Linear], bool] | None = None,
    density: float,
    criterion: str = "magnitude",
    per: str = "matrix",
    precision: str | None = None,
) -> dict[str, BlockSparseLinear]:
    """Swap the ``nn.Linear`` layers of ``model`` for :class:`BlockSparseLinear` in place, and
    return the new ones by their names.

    - ``model``: an ``nn.Module``.
    - ``block``, ``density``, ``criterion``, ``per``, ``precision``: as of
      :meth:`BlockSparseLinear.from_linear`.
    - ``match``: which layers, as of :func:`sparsify`. Leave out a head that shares the weight of an
      embedding, and layers whose features are no multiple of the block's.

    The dense weight of each layer is let go before the next one. dtype, device, training mode and
    what requires a gradient stay as they were; weight and bias are new parameters, so make an
    optimizer after this. A layer that stands in several places is swapped in all of them. Swapped
    are ``nn.Linear`` itself and transformers' ``Conv1D``: what derives from ``nn.Linear`` may be
    more. Of a parametrized weight the values count, and the parametrization ends. A weight on
    "meta" makes a layer without blocks, which a state fills, or ``reset_parameters`` draws. Where
    layers of an ``nn.TransformerEncoderLayer`` are swapped, torch's fused path of evaluation is
    turned off for it: one that is put there by hand needs
    ``torch.backends.mha.set_fastpath_enabled(False)``.

    Warns with a :class:`kernlib.KernlibWarning` where nothing is swapped, and of layers that stay
    because they are no ``nn.Linear`` itself, such as quantized ones.

    Raises, with ``model`` as it was, ValueError that names the layer for features that are no
    multiple of the block's, for a weight that another module holds too and for one without values,
    TypeError that names it for one of another dtype than float16, bfloat16, float32 and float64,
    and TypeError for a ``model`` that is an ``nn.Linear`` itself.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 10))
        >>> new = kl.nn.block_sparsify(model, 16, match="0", density=0.5)
        >>> new["0"] is model[0], model[0].layout.density
        (True, 0.5)
    """
    check_model(model, "use BlockSparseLinear.from_linear")
    match = checked_match(match)
    block = check_options(block, density, criterion, per)
    BlockSparseMatmul("dds", precision=precision)  # raises for a wrong precision

    def check(linear: nn.Linear) -> None:
        check_multiple(tuple(check_linear(linear).weight.shape), block)

    def in_blocks(linear: nn.Linear, names: list[str]) -> BlockSparseLinear:
        return BlockSparseLinear.from_linear(
            linear, block, density=density, criterion=criterion, per=per, precision=precision
        )

    return swap("block_sparsify", model, match, BlockSparseLinear, check, in_blocks)


def check_linear(linear) -> nn.Linear:
    """The nn.Linear that a layer is, whose weight may be one of blocks. Raises TypeError and
    ValueError for one that has no such weight with values."""
    linear = checked_linear(linear)
    if "weight" not in linear._parameters:
        raise ValueError(
            "the weight of linear is computed of other tensors, by hooks of pruning, weight_norm "
            "or spectral_norm: take that off before"
        )
    weight = linear.weight
    if weight.dim() != 2:
        raise ValueError(
            "the weight of linear must be a matrix (out_features, in_features), got shape "
            f"{tuple(weight.shape)}"
        )
    checked_dtype(weight.dtype)
    return linear
