"""Block-sparse attention as lowering sees it: sizes, strides, names of dtypes, text of a score.

Strides are in elements, alignments those of the first address in bytes, 16 at most. What a layout
holds, and the numbers of a call (scale, window, lengths, probability and seed of a dropout), are no
part of a problem: one kernel, and one plan, serves them all.
"""

# Annotations are no text here: of text NamedTuple compiles each, 0.3 ms of a first call.

from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.lowering.arithmetic import ceil_div
from kernlib.records import NamedTuple


class Operand(NamedTuple):
    """A tensor (batch, heads, rows, features), whose features lie side by side: from one batch,
    head and row to the next."""

    batch: int
    head: int
    row: int
    alignment: int = 16


class View(NamedTuple):
    """A captured tensor: from one batch, head, row and column to the next, 0 along axes that it
    does not have or that are broadcast."""

    batch: int = 0
    head: int = 0
    row: int = 0
    col: int = 0


class Score(NamedTuple):
    """What becomes of logits: the text of ``struct Score`` as score.cuh describes it, empty for
    none; the dtypes of captured tensors, in order; and what the text and the call have."""

    text: str = ""
    captured: tuple[str, ...] = ()
    has_score: bool = False
    has_mask: bool = False
    causal: bool = False
    window: bool = False
    lengths: bool = False
    dropout: bool = False


class Attention(NamedTuple):
    """``out[b, h] = softmax(score(scale * q[b, h] k[b, g]^T)) v[b, g]`` over what a layout stores,
    for g = h // (heads // kv_heads). The layout's head of (b, h) is ``b * layout_batch + h *
    layout_head``. ``captured`` has a view of each captured tensor."""

    dtype: str
    blocks: Blocks
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    features: int
    values: int
    layout_batch: int
    layout_head: int
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    score: Score = Score()
    captured: tuple[View, ...] = ()

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self.heads // self.kv_heads

    def row_tiles(self, rows: int) -> int:
        """Tiles of so many rows of a head."""
        return ceil_div(self.queries, rows)

    def column_tiles(self, columns: int) -> int:
        """Tiles of so many columns of a head."""
        return ceil_div(self.keys, columns)


class Collected(NamedTuple):
    """The gradient by a captured tensor as kernels leave it, in float32: for each batch and head a
    number for each row ("row"), column ("col"), or pair of these ("pair"), by ``strides``. It
    begins as zeros. Strides of 0 from one batch or head to the next are for sums over these, which
    cost parallelism and are known of rows and pairs alone; other sums are the caller's, over rows
    too where a tensor has neither rows nor columns."""

    index: int  # of the captured tensor
    axes: str
    strides: View


class AttentionGradient(NamedTuple):
    """By q, k and v, of which ``needs`` says what is wanted, and by captured tensors. ``grad`` is
    that of ``attention.out``; ``has_grad_lse`` whether there is one of the log-sum-exp too. Operand
    ``collected<i>`` is the i-th of ``collected``."""

    attention: Attention
    grad: Operand
    dq: Operand
    dk: Operand
    dv: Operand
    needs: tuple[bool, bool, bool] = (True, True, True)
    has_grad_lse: bool = False
    collected: tuple[Collected, ...] = ()
