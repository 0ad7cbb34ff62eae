"""Softmax of block-sparse matrices."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar

from kernlib.descriptors.base import Descriptor, check_flag, explained, render, shown

MODES = ("add", "mul")  # of a mask


@explained
@dataclass(frozen=True, slots=True, repr=False)
class BlockSparseSoftmax(Descriptor):
    """Softmax over the stored entries of each row of a block-sparse matrix, whose blocks a
    :class:`kernlib.blocksparse.Layout` places in a matrix of R rows and C columns.

    With sums over the columns c of row r that lie in stored blocks,

        ``y[r, c] = exp(l[r, c]) / sum_c exp(l[r, c])``,
        ``l[r, c] = x[r, c] * scale + rpe[r, c] + key_padding_mask[c] + attn_mask[r, c]``,

    computed in float32, in float64 for float64, and rounded once. ``rpe`` says whether a call is
    given scores of relative positions. ``key_padding_mask`` and ``attn_mask`` say whether it is
    given that mask, and what it does: None for no mask; ``"add"`` adds it; ``"mul"`` takes 0 for
    -inf and anything else for 0. ``causal`` takes all columns c > r out. A column that a "mul"
    mask, a mask of bools or ``causal`` takes out counts as -inf whatever x holds there; a float
    mask that is added meets it, so that NaN and inf stay NaN beside its -inf.

    A row of which nothing is stored, or of which every logit is -inf, is 0, and so are its
    gradients; a row with NaN or +inf is NaN, as torch's is. Slots that hold no block are 0.

    Raises TypeError for flags that are no bools, ValueError for another mode. The operation is
    Torch-Blocksparse's ``Softmax``.

    ``kernlib.run_kernel(descriptor, layout, x, out=None, scale=1.0, rpe=None,
    key_padding_mask=None, attn_mask=None)``:

    - ``layout``: a :class:`kernlib.blocksparse.Layout`.
    - ``x`` (..., capacity, block rows, block columns): values of any strides, float32, float16,
      bfloat16 or float64. Dimensions in front of these are the batch, Z below.
    - ``scale``: a real number, or a tensor of shape () that stays on the device and is not looked
      at there.
    - ``rpe``: a tensor that broadcasts to (Z, H, R, C), or to (Z, R, C) where the layout has no
      heads.
    - ``key_padding_mask``: a tensor that broadcasts to (Z, C), without an axis of heads: (C,) is
      one mask for all; of several leading dimensions those of the mask are the last of Z.
    - ``attn_mask``: a tensor (R, C).
    - Masks are bools, of which True takes part in both modes, as with torch's
      ``scaled_dot_product_attention`` (and the opposite of ``torch.nn.MultiheadAttention``), or
      floats of x's dtype; rpe has x's dtype.
    - ``out``: x's shape and dtype, any strides, written in place; it may be x itself. Without it
      a new contiguous tensor. x is written in no other way.

    Autocast leaves x's dtype as it is, and casts rpe and float masks to that. Gradients are
    recorded of x, of scale, of rpe and of float masks that are added, and those of the gradients.
    That of rpe is without the scale; each is deterministic. Masks of "mul" and bools have none.

    A call raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.

    Example:
        >>> softmax = kl.BlockSparseSoftmax(causal=True, attn_mask="add")
        >>> softmax.operands, softmax.parameters, softmax.options["scale"], softmax.describe()
        (('layout', 'x'), ('attn_mask',), 1.0, 'BlockSparseSoftmax(causal, attn_mask=add)')
        >>> x, layout = torch.zeros(1, 16, 16), kl.blocksparse.dense(16, 16, block=16)
        >>> kl.run_kernel(softmax, layout, x, attn_mask=torch.zeros(16, 16))[0, 3, :5]
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.0000])
    """

    family: ClassVar[str] = "blocksparse"
    package: ClassVar[str] = "softmax"

    _: KW_ONLY
    causal: bool = False
    key_padding_mask: str | None = None
    attn_mask: str | None = None
    rpe: bool = False
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is

    def __post_init__(self):
        check_flag("causal", self.causal)
        check_flag("rpe", self.rpe)
        for name in ("key_padding_mask", "attn_mask"):
            mode = getattr(self, name)
            if mode is not None and (not isinstance(mode, str) or mode not in MODES):
                raise ValueError(f"{name} must be None or one of {MODES}, got {shown(mode)}")
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)  # a str computes its hash once

    def __reduce__(self):
        names = ("causal", "key_padding_mask", "attn_mask", "rpe")
        return partial(type(self), **{name: getattr(self, name) for name in names}), ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tensors that a call is given besides x."""
        masks = [name for name in ("key_padding_mask", "attn_mask") if getattr(self, name)]
        return (*["rpe"] * self.rpe, *masks)

    @property
    def operands(self) -> tuple[str, ...]:
        return "layout", "x"

    @property
    def options(self) -> dict[str, object]:
        return {"scale": 1.0, "out": None, "debug": False}

    def describe(self) -> str:
        masks = [f"{name}={getattr(self, name)}" for name in self.parameters if name != "rpe"]
        parts = ["causal"] * self.causal + ["rpe"] * self.rpe + masks
        return f"BlockSparseSoftmax({', '.join(parts)})"
