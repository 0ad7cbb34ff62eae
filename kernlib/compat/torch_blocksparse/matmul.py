"""Torch-Blocksparse's products and softmax."""

from __future__ import annotations

import torch

from kernlib.descriptors.base import check_flag, shown
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.functions import softmax
from kernlib.hints.calls import hinted
from kernlib.runtime.tensors import check_dense, check_layout

MODES = ("sdd", "dsd", "dds")


class OnDevices:
    """A layout as Torch-Blocksparse has them, with a copy for each device that it is used on."""

    def __init__(self, layout: torch.Tensor, block: int):
        checked = layout if isinstance(layout, Layout) else Layout(_with_heads(layout), block)
        if checked.heads is None:
            raise ValueError("layout must have a dimension of heads, [H, rows / b, cols / b]")
        self.sizes = torch.Size((checked.heads, *checked.grid))
        self._made = {checked.device: checked}

    def on_any(self) -> Layout:
        """The layout wherever it was made."""
        return next(iter(self._made.values()))

    def on(self, device: torch.device) -> Layout:
        """The layout there."""
        layout = self._made.get(device)
        if layout is None:
            layout = self._made[device] = self.on_any().to(device)
        return layout


@hinted
class MatMul:
    """A product of ``mode`` "sdd", "dsd" or "dds", called ``op(a, b, out=None)``: the letters say
    what result, a and b are, sparse or dense.

    - ``layout``: a tensor of 0 and 1 [H, rows / block, cols / block], of the sparse operand before
      ``trans_a`` or ``trans_b`` transposes it, or of the result. It is read once.
    - ``block``: 16, 32, 64 or 128.
    - ``trans_a``, ``trans_b``: whether the last two dimensions of a or b are transposed.
    - ``bench``: nothing.

    a and b are [Z, H, rows, cols] where they are dense, dimensions in front that are missing being
    1, and [Z, nnz, block, block] or [nnz, block, block] where they are sparse. The result has four
    dimensions. See :func:`kernlib.blocksparse.sdd`, ``dsd`` and ``dds``, which compute it.

    Raises NotImplementedError for other modes, TypeError and ValueError for other arguments.
    """

    def __init__(
        self,
        layout: torch.Tensor,
        block: int,
        mode: str,
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ):
        if mode not in MODES:
            raise NotImplementedError(f"Supported modes are: sdd, dsd, dds; mode was {shown(mode)}")
        check_flag("trans_a", trans_a)
        check_flag("trans_b", trans_b)
        self.layout, self.block, self.mode = layout, block, mode
        self.trans_a, self.trans_b, self.bench = trans_a, trans_b, bench
        self._layouts = OnDevices(layout, block)
        self.spdims = self._layouts.sizes

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product of ``a`` and ``b``, written to ``out`` if there is one. Raises as the class
        says."""
        check_dense(("a", "b"), a=a, b=b, out=out)
        layout = self._layouts.on(a.device)
        run = {"sdd": _sdd, "dsd": _dsd, "dds": _dds}[self.mode]
        return run(a, b, layout, {"transpose_a": self.trans_a, "transpose_b": self.trans_b}, out)


def _sdd(a, b, layout: Layout, flags: dict, out) -> torch.Tensor:
    return sdd(_padded(a), _padded(b), layout, **flags, out=out)


def _dsd(a, b, layout: Layout, flags: dict, out) -> torch.Tensor:
    return dsd(a, _padded(b), layout, **flags, out=out)


def _dds(a, b, layout: Layout, flags: dict, out) -> torch.Tensor:
    return dds(_padded(a), b, layout, **flags, out=out)


@hinted
class Softmax:
    """Softmax over the stored blocks of each row, called ``op(x, scale=1.0, rpe=None,
    key_padding_mask=None, attn_mask=None, key_padding_mask_mode="add", attn_mask_mode="add",
    is_causal=False, inplace=False)``.

    ``layout`` is a tensor of 0 and 1 [H, Lq / block, Lk / block], ``block`` 16, 32, 64 or 128, and
    ``bench`` means nothing. x and the result are [Z, nnz, block, block] or [nnz, block, block];
    ``rpe`` broadcasts to [Z, H, Lq, Lk], ``key_padding_mask`` is [Z, Lk], ``attn_mask`` [Lq, Lk],
    all of x's dtype, or masks of bools, of which True takes part. A mask of mode "add" is added,
    one of "mul" leaves out what it is 0 for. ``inplace=True`` writes x, and is what
    Torch-Blocksparse does. See :func:`kernlib.blocksparse.softmax`, which computes it.

    Raises ValueError for masks of another dtype, TypeError and ValueError for other arguments.
    """

    def __init__(self, layout: torch.Tensor, block: int, bench: bool = False):
        self.layout, self.block, self.bench = layout, block, bench
        self._layouts = OnDevices(layout, block)
        self.spdims = self._layouts.sizes

    def __call__(
        self,
        x: torch.Tensor,
        scale: float | torch.Tensor = 1.0,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
        is_causal: bool = False,
        inplace: bool = False,
    ) -> torch.Tensor:
        """The probabilities of scores ``x``, or ``x`` itself with ``inplace``. Arguments and errors
        are those that the class says."""
        check_dense(("x",), x=x)
        check_flag("inplace", inplace)
        tensors = {"rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        check_dense((), **tensors)
        for name, value in tensors.items():
            is_bool = name != "rpe" and value is not None and value.dtype == torch.bool
            if value is not None and value.dtype != x.dtype and not is_bool:
                raise ValueError(f"{name} must be {x.dtype} as x is, got {value.dtype}")
        recorded = torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in (x, scale, *tensors.values())
        )
        out = x if inplace and not recorded else None
        # Its gradient is by what x holds before it is written.
        copied = inplace and recorded and isinstance(scale, torch.Tensor) and scale.requires_grad
        y = softmax(
            x.clone() if copied else x, self._layouts.on(x.device), scale, rpe,
            key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode, is_causal, out,
        )  # fmt: skip
        return x.copy_(y) if inplace and recorded else y


def _with_heads(layout) -> torch.Tensor:
    """Raises ValueError for what has no dimension of heads."""
    if isinstance(layout, torch.Tensor):
        check_layout("layout", layout)
    if not isinstance(layout, torch.Tensor) or layout.dim() != 3:
        raise ValueError(
            "layout must be a tensor of 0 and 1 [H, rows / block, cols / block], got "
            f"{shown(layout)}"
        )
    return layout


def _padded(x: torch.Tensor) -> torch.Tensor:
    """A dense operand with four dimensions at least; one of fewer than two is wrong as it is."""
    return x[(None,) * max(0, 4 - x.dim())] if x.dim() > 1 else x
