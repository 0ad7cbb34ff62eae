"""peft's BOFT adapters by products with their blocks: :func:`accelerate` once, and no other change.

A BOFT layer rotates its input: ``y = (x R) W^T s + bias``, where R is a product of factors, each of
which has orthogonal blocks of ``boft_block_size`` features. peft lays out each factor and R, all
features by all features, in every call, so that a step takes ``2 features^3`` operations for each
factor, however small its blocks. Here x is multiplied by the blocks alone, as a
:class:`kernlib.KroneckerSparse` factor, forward and backward. The blocks are peft's own, by the
Cayley transform in float32, and so is all else: parameters, names, ``state_dict``,
``save_pretrained``, merging, dropout, several adapters at a time.

peft is imported when :func:`accelerate` is called, and not before. BOFT is of Liu et al. (2024),
https://arxiv.org/abs/2311.06243.

Example:
    >>> from kernlib.compat import peft as fast
    >>> config = peft.BOFTConfig(boft_block_size=8, target_modules=["0"])  # doctest: +SKIP
    >>> model = peft.get_peft_model(torch.nn.Sequential(linear), config)  # doctest: +SKIP
    >>> list(fast.accelerate(model))  # doctest: +SKIP
    ['base_model.model.0']
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from kernlib.descriptors.base import shown
from kernlib.errors import warn
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse
from kernlib.hints.calls import hinted
from kernlib.nn.linears import check_model, has_hooks
from kernlib.run import run_kernel

__all__ = ["accelerate", "restore"]

MODULE = "peft.tuners.boft.layer"
BLOCK = 64  # features that tensor cores take at a time: blocks of fewer stand in one of so many


@hinted
def accelerate(model: nn.Module) -> dict[str, nn.Module]:
    """Have the BOFT layers of ``model``, which peft made, compute by kernlib, in place, and return
    them by name.

    Taken are peft's ``boft.layer.Linear`` themselves; their layers for convolutions stay, which a
    :class:`kernlib.KernlibWarning` says, and so it does if there is none to take. Results are those
    of peft but for rounding, which is less in half precision: R is not rounded as a whole. Layers
    that are merged or disabled, and models of CPU tensors, compute as they should too. Raises
    TypeError for what is no module, and ImportError without peft.
    """
    check_model(model, "give the model that holds it")
    boft, fast = import_module(MODULE), _fast_class()
    layers = {n: m for n, m in model.named_modules() if type(m) is boft.Linear}
    rest = [n for n, m in model.named_modules() if type(m) is boft.Conv2d]
    for layer in layers.values():
        _change_class(layer, fast)
    if rest:
        warn(f"accelerate leaves BOFT layers of convolutions to peft: {shown(rest)}")
    elif not layers:
        warn(f"accelerate takes no layer: {type(model).__name__} has no BOFT layer of peft in it")
    return layers


@hinted
def restore(model: nn.Module) -> dict[str, nn.Module]:
    """Have such layers of ``model`` compute by peft again, in place, and return them by name.
    Raises TypeError for what is no module, and ImportError without peft."""
    check_model(model, "give the model that holds it")
    boft, fast = import_module(MODULE), _fast_class()
    layers = {n: m for n, m in model.named_modules() if type(m) is fast}
    for layer in layers.values():
        _change_class(layer, boft.Linear)
    return layers


def _change_class(layer: Any, to: Any) -> None:
    """Hooks of Hugging Face's accelerate, as ``device_map`` sets them, keep a layer's forward in an
    attribute: there too."""
    forward = type(layer).forward
    layer.__class__ = to
    for name, value in list(vars(layer).items()):
        if getattr(value, "__func__", None) is forward:
            setattr(layer, name, to.forward.__get__(layer))


def __getattr__(name: str) -> object:
    """``BOFTLinear``, by which pickles of accelerated layers name their class."""
    if name == "BOFTLinear":
        return _fast_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=1)
def _fast_class() -> Any:
    """A subclass of peft's layer, for whose definition peft has to be there."""
    base: Any = import_module(MODULE).Linear

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = [name for name in self.active_adapters if name in self.boft_R]
        if self.disable_adapters or self.merged or not names:
            return base.forward(self, x, *args, **kwargs)
        dtype, scale = x.dtype, None
        for name in reversed(names):  # x is multiplied by the last adapter's rotation first
            x = _rotated(x, _blocks(self, name))
            s = self.boft_s[name].squeeze(-1)
            scale = s if scale is None else scale * s
        return _scaled(self.base_layer, x, scale, args, kwargs).to(dtype)

    names = {"__module__": __name__, "__doc__": base.__doc__, "forward": forward}
    return type("BOFTLinear", (base,), names)


def _blocks(layer: Any, name: str) -> torch.Tensor:
    """The orthogonal blocks of an adapter's factors, (factors, blocks, size, size), in float32."""
    skew = layer.boft_R[name]
    return layer.boft_dropout[name](layer.cayley_batch(skew.flatten(0, 1)).view_as(skew))


def _rotated(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``x B_last ... B_0``. Factor i pairs half blocks that are 2^i of these apart."""
    for index in range(blocks.shape[0] - 1, -1, -1):
        x = _by_blocks(x, blocks[index], 2**index)
    return x


def _by_blocks(x: torch.Tensor, blocks: torch.Tensor, apart: int) -> torch.Tensor:
    """x (..., features) by one factor: its half blocks brought together, multiplied and brought
    back."""
    if apart == 1:
        return _block_diagonal(x, blocks)
    count, size = blocks.shape[:2]
    pairs = x.unflatten(-1, (count // apart, 2, apart, size // 2))
    near = pairs.transpose(-3, -2).flatten(-4)
    y = _block_diagonal(near, blocks).unflatten(-1, (count // apart, apart, 2, size // 2))
    return y.transpose(-3, -2).flatten(-4)


def _block_diagonal(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``y[..., i, j] = sum_k x[..., i, k] blocks[i, k, j]``."""
    blocks = blocks.to(x.dtype)
    count, size = blocks.shape[:2]
    together = max(n for n in range(1, max(2, BLOCK // size + 1)) if count % n == 0)
    if together > 1:  # block-diagonal ones of at most BLOCK features
        inner = blocks.unflatten(0, (count // together, together)).permute(0, 2, 3, 1)
        blocks = torch.diag_embed(inner).permute(0, 3, 1, 4, 2).flatten(3, 4).flatten(1, 2)
    weight = blocks.transpose(1, 2).unsqueeze(-1).contiguous()
    return run_kernel(_factor(*weight.shape[:2]), x, weight)


@lru_cache(maxsize=64)
def _factor(count: int, size: int) -> KroneckerSparse:
    return KroneckerSparse(count, size, size, 1)


def _scaled(layer: nn.Module, x: torch.Tensor, scale: torch.Tensor, args, kwargs) -> torch.Tensor:
    """``layer(x)`` with all but its bias times ``scale``."""
    bias = layer.bias
    is_plain = type(layer) is nn.Linear and "forward" not in vars(layer) and not has_hooks(layer)
    if is_plain and not (args or kwargs):
        y = nn.functional.linear(x, layer.weight) * scale
        return y if bias is None else y + bias
    y = layer(x, *args, **kwargs)
    return y * scale if bias is None else (y - bias) * scale + bias
