"""Products of float8 with scales and one block-sparse operand."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar

from kernlib.descriptors.base import check_flag, explained, render, shown
from kernlib.descriptors.epilogues import Epilogue, Product

MODES = ("dsd", "dds")  # as of BlockSparseMatmul
OUT_DTYPES = ("bfloat16", "float16")


@explained
@dataclass(frozen=True, slots=True, repr=False)
class BlockSparseScaledMatmul(Product):
    """A float8 product of a block-sparse matrix S and a dense matrix, for inference. Each stored
    block of S has a scale, and so has each vector of the dense matrix that is multiplied.

    With blocks ``S[b]`` that :class:`kernlib.blocksparse.Layout` places and sums in float32,

    - ``"dsd"``: ``out[l, n] = scale_b[n] * sum over blocks b of scale_a[b] * sum_k S[b][l, k]
      b[k, n]``, of values, b (..., C, N) and a result (..., R, N).
    - ``"dds"``: ``out[m, l] = scale_a[m] * sum over blocks b of scale_b[b] * sum_k a[m, k]
      S[b][k, l]``, of a (..., M, R), values and a result (..., M, C).

    ``transpose_a`` and ``transpose_b`` are those of :class:`kernlib.BlockSparseMatmul`. A linear
    layer is "dds" with ``transpose_b``: x (..., M, C) times the transpose of a weight (R, C).
    ``out_dtype`` is the result's, ``"bfloat16"`` or ``"float16"``.

    Raises ValueError for another mode or dtype, TypeError for flags that are no bools. The scale of
    a block is that of "DeepSeek-V3 Technical Report" (2024), the modes are Torch-Blocksparse's.

    ``kernlib.run_kernel(descriptor, layout, a, b, scale_a, scale_b, out=None)``:

    - ``layout``: a :class:`kernlib.blocksparse.Layout`.
    - values (..., capacity, block rows, block columns) and the dense operand, as of
      BlockSparseMatmul, ``torch.float8_e4m3fn``. :func:`kernlib.blocksparse.quantize` makes them.
    - the scale of values: float32 (..., capacity) of values (..., capacity, ...).
    - that of the dense operand: float32, of shape () for all of it, or with one for each column
      that is multiplied, (..., N) or (..., M), which broadcasts to the batch, heads among it.
    - ``out``: the shape and dtype of the result, any strides, written in place; without it a new
      contiguous tensor.

    Blocks of 128 x 128 are multiplied by a kernel of Hopper's (sm_90a), where the sum runs along
    rows of the stored blocks: "dsd" without ``transpose_a`` and "dds" with ``transpose_b``; the
    dense operand is copied where the sum does not run along its contiguous dimension. All else is
    computed by torch in float32, and so are gradients, which only scales have.

    What a block that is not stored would meet is not read, nor is what lies in slots without a
    block. A call raises ValueError and TypeError that name the argument, RuntimeError for an
    ``out`` while gradients are recorded.

    Example:
        >>> product = kl.BlockSparseScaledMatmul("dds", transpose_b=True, out_dtype="float16")
        >>> product.operands, product.transposed, product.axis
        (('layout', 'a', 'b', 'scale_a', 'scale_b'), True, -1)
        >>> product.describe()
        'BlockSparseScaledMatmul(dds, transpose_b, float16)'
    """

    family: ClassVar[str] = "blocksparse"
    package: ClassVar[str] = "scaled"
    epilogue: ClassVar[tuple[Epilogue, ...]] = ()
    precision: ClassVar[str] = "fp32"

    mode: str
    _: KW_ONLY
    transpose_a: bool = False
    transpose_b: bool = False
    out_dtype: str = "bfloat16"
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is

    def __post_init__(self):
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {shown(self.mode)}")
        check_flag("transpose_a", self.transpose_a)
        check_flag("transpose_b", self.transpose_b)
        if not isinstance(self.out_dtype, str) or self.out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype must be one of {OUT_DTYPES}, got {shown(self.out_dtype)}")
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)  # a str computes its hash once

    def __reduce__(self):
        names = ("transpose_a", "transpose_b", "out_dtype")
        return partial(type(self), **{name: getattr(self, name) for name in names}), (self.mode,)

    @property
    def operands(self) -> tuple[str, ...]:
        return "layout", "a", "b", "scale_a", "scale_b"

    @property
    def transposed(self) -> bool:
        """Whether the sparse operand is S's transpose."""
        return self.transpose_a if self.mode == "dsd" else self.transpose_b

    @property
    def axis(self) -> int:
        """The dimension of a result that is a line of op(S)."""
        return -2 if self.mode == "dsd" else -1

    def describe(self) -> str:
        flags = [name for name in ("transpose_a", "transpose_b") if getattr(self, name)]
        return f"BlockSparseScaledMatmul({', '.join([self.mode, *flags, self.out_dtype])})"
