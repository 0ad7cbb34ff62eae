"""Attention over the stored blocks of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar

from kernlib.descriptors.base import Descriptor, check_flag, explained, render, shown
from kernlib.descriptors.expression import POSITIONS
from kernlib.descriptors.score.expression import ScoreExpression

AXES = POSITIONS  # of captured tensors
# Of those whose axes are not given, by their dimensions: as masks of torch's attention.
BY_DIMENSIONS = {0: (), 2: AXES[2:], 3: AXES[1:], 4: AXES}
FIELDS = ("score", "mask", "captured", "causal", "window", "lengths", "dropout")
Captured = tuple[tuple[str, tuple[str, ...]], ...]


@explained
@dataclass(frozen=True, slots=True, repr=False)
class BlockSparseAttention(Descriptor):
    """Attention of queries to the keys in stored blocks, which a
    :class:`kernlib.blocksparse.Layout` places in a matrix of a row a query and a column a key.

    With the query head h that reads the key and value head h // (H / HK), of the batch b,

        ``out[b, h, i] = sum_j p[i, j] * v[b, h', j]``, ``lse[b, h, i] = log(sum_j exp(l[i, j]))``,
        ``p[i, j] = exp(l[i, j] - lse[b, h, i])``, ``l[i, j] = score(scale * <q_i, k_j>)``

    over the keys j that are not left out. A key is left out unless its block is stored, and with

    - ``causal``: where it is behind the query, j > i;
    - ``window``: unless i - left <= j <= i + right;
    - ``lengths``: where i >= q_lengths[b] or j >= kv_lengths[b];
    - ``mask``: where that condition does not hold.

    ``score`` is an expression of ``v``, the scaled product, and ``mask`` a condition without it;
    both may name ``row`` (i), ``col`` (j), ``head`` (h), ``batch`` (b) and the tensors of
    ``captured``: a mapping of names to axes, which are the tensor's dimensions in order, each one
    of "batch", "head", "row" and "col", none for a tensor of shape (). ``dropout`` says that
    probabilities are dropped: by a counter, so that the same seed drops the same of them in every
    pass.

    Sums are float32, float64 for float64 tensors, and results are rounded once. A query of which no
    key is left has an out of 0, an lse of -inf and gradients of 0; one with NaN or +inf among what
    is left is NaN, as torch's is. What is left out counts as -inf whatever q and k hold there.

    Raises TypeError and ValueError for fields that are none of these.

    ``kernlib.run_kernel(descriptor, layout, q, k, v, *, scale=None, window=None, q_lengths=None,
    kv_lengths=None, dropout_p=None, seed=None, return_lse=False, out=None, **captured)``:

    - ``layout``: a :class:`kernlib.blocksparse.Layout` of ceil(LQ / rows of a block) by ceil(LK /
      columns of a block) blocks, without heads, of H heads, or of B * H, that of b and h being
      b * H + h.
    - ``q`` (B, H, LQ, E), ``k`` (B, HK, LK, E), ``v`` (B, HK, LK, EV): of one dtype and any
      strides; H is a multiple of HK. float16 and bfloat16 of E and EV up to 256 by kernels; float32
      and float64, and larger ones, by torch.
    - ``scale``: a real number, or a tensor of shape () that stays on the device and is not looked
      at there; 1 / sqrt(E) by default.
    - ``window``: two ints (left, right) of at least 0, or one for both; None in the place of one
      leaves that side open.
    - ``q_lengths``, ``kv_lengths``: int32 or int64 (B,) on q's device, from 0 to LQ and to LK; one
      of them may be left out. Those of CPU tensors are looked at. On a GPU, where that would wait,
      what is below 0 counts as 0 and what is above as all, unless ``debug=True`` has them checked.
    - ``dropout_p``: the part of the probabilities that is dropped, 0 to 1, without 1 and what
      rounds to 1, as it is rounded to a whole number of 65536ths; the others are divided by
      1 - dropout_p.
    - ``seed``: an int, or an int64 tensor of shape () on q's device, which may change between
      replays of a CUDA graph. By default one is drawn from torch's generator of the device. The
      function ``blocksparse.attention`` takes and needs none without dropout, as in evaluation.
    - captured tensors: float32, float16, bfloat16, float64, int32, int64 or bool, each dimension of
      its axis' size, or 1.
    - ``out`` (B, H, LQ, EV): of q's dtype and any strides. Without it a new contiguous tensor.

    The result is ``out``, with ``return_lse`` the pair of it and ``lse`` (B, H, LQ) in float32,
    float64 for float64. Autocast casts q, k and v, as it does those of torch's
    ``scaled_dot_product_attention``. Gradients are recorded of q, k, v, of captured tensors of
    floats, through lse too, and those of gradients; each is deterministic. A scale has none: that
    of a captured tensor of shape (), by which ``score`` multiplies, is recorded.

    A call raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.

    Example:
        >>> score, axes = "v + slope * col", {"slope": ("head",)}
        >>> attention = kl.BlockSparseAttention(score=score, captured=axes, causal=True)
        >>> attention.operands, attention.names, attention.required, [*attention.options]
        (('layout', 'q', 'k', 'v'), ('slope',), ('slope',), ['scale', 'return_lse', 'out', 'debug'])
        >>> attention.describe()
        "BlockSparseAttention(causal, score='v + slope * col')"
    """

    family: ClassVar[str] = "blocksparse"
    package: ClassVar[str] = "attention"

    _: KW_ONLY
    score: str | None = None
    mask: str | None = None
    captured: Mapping[str, tuple[str, ...]] | Captured = ()
    causal: bool = False
    window: bool = False
    lengths: bool = False
    dropout: bool = False
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is
    expression: ScoreExpression = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        check_flag("causal", self.causal)
        for name in ("window", "lengths", "dropout"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise TypeError(
                    f"{name} must be a bool, got {shown(value)}: whether there is one, which each "
                    "call gives"
                )
        expression = ScoreExpression(self.score, self.mask, self.captured)
        object.__setattr__(self, "captured", expression.captured)
        object.__setattr__(self, "expression", expression)
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)  # a str computes its hash once

    def __reduce__(self):
        return partial(type(self), **{name: getattr(self, name) for name in FIELDS}), ()

    @property
    def names(self) -> tuple[str, ...]:
        """The captured tensors' names, in order."""
        return tuple(name for name, _ in self.captured)

    @property
    def operands(self) -> tuple[str, ...]:
        return "layout", "q", "k", "v"

    @property
    def required(self) -> tuple[str, ...]:
        return (*["window"] * self.window, *["dropout_p"] * self.dropout, *self.names)

    @property
    def options(self) -> dict[str, object]:
        lengths = {"q_lengths": None, "kv_lengths": None} if self.lengths else {}
        seed = {"seed": None} if self.dropout else {}
        rest = {"return_lse": False, "out": None, "debug": False}
        return {"scale": None} | lengths | seed | rest

    def describe(self) -> str:
        flags = ("causal", "window", "lengths", "dropout")
        parts = [name for name in flags if getattr(self, name)]
        parts += [f"{n}={shown(getattr(self, n))}" for n in ("score", "mask") if getattr(self, n)]
        return f"BlockSparseAttention({', '.join(parts)})"
