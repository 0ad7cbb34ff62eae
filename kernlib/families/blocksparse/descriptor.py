"""Products with one block-sparse operand or a block-sparse result."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar

from kernlib.descriptors.base import check_flag, check_precision, explained, render, require, shown
from kernlib.descriptors.epilogues import Epilogue, Product, as_epilogues

MODES = ("sdd", "dsd", "dds")  # sparse (s) or dense (d): result, a, b


@explained
@dataclass(frozen=True, slots=True, repr=False)
class BlockSparseMatmul(Product):
    """``epilogue(op(a) op(b))`` with a block-sparse result or operand, whose blocks a
    :class:`kernlib.blocksparse.Layout` places in a matrix S of R rows and C columns.

    The letters of ``mode`` say what result, a and b are, sparse or dense:

    - ``"sdd"``: ``S = op(a) op(b)``, of which the stored blocks are computed: a (..., R, K) and
      b (..., K, C) give values (..., capacity, block rows, block columns).
    - ``"dsd"``: ``op(S) op(b)``: values and b (..., C, N) give (..., R, N).
    - ``"dds"``: ``op(a) op(S)``: a (..., M, R) and values give (..., M, C).

    ``op`` is the transpose where ``transpose_a`` or ``transpose_b`` says so, of a dense operand's
    last two dimensions or of S: its blocks stay as they are stored, and R and C change places.
    ``epilogue`` is none, one or several of :mod:`kernlib.descriptors.epilogues`. A
    :class:`kernlib.Bias` has a value for each row of the result of "dsd", for each column of that
    of "dds"; "sdd" takes none. :class:`kernlib.Add` adds a tensor of the result's shape.
    ``precision`` permits less accuracy of float32: ``"tf32"`` and ``"bf16"`` let the products be
    taken in TF32, ``"fp32"`` does not, None does if torch's settings permit it to torch's
    products at the call.

    Raises ValueError for another mode and a bias of "sdd", TypeError for parts of another kind. The
    operation is that of the Torch-Blocksparse project; the modes are those of "GPU Kernels for
    Block-Sparse Weights" (Gray, Radford and Kingma, 2017).

    ``kernlib.run_kernel(descriptor, layout, a, b, out=None, **parameters)``:

    - ``layout``: a :class:`kernlib.blocksparse.Layout`. Where its mask has heads, each dense
      operand has a dimension of heads, or of 1, in front of its last two, and so has a dense
      result.
    - values (..., capacity, block rows, block columns) of any strides: those of slots that hold no
      block are not read, and written as 0. Dimensions in front of these, and of the heads and
      matrices of the dense operand, broadcast.
    - float32, float16, bfloat16 or float64, the same for all tensors. Sums of half types are
      float32. Under autocast tensors are cast as those of ``torch.nn.Linear`` are.
    - ``out``: the shape and dtype of the result, any strides, written in place; without it a new
      contiguous tensor.
    - One argument for each parameter of the epilogue: ``bias`` a tensor (features,), scalars as
      real numbers or tensors of shape () that stay on the device and are not looked at there.

    What a block that is not stored would meet is not read: NaN there reaches no result. A line
    without blocks is ``epilogue(0)``. Gradients of a, b and the epilogue's parameters are recorded,
    and those of the gradients.

    A call raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.

    Example:
        >>> product = kl.BlockSparseMatmul("dds", transpose_b=True, epilogue=kl.Relu())
        >>> product.operands, product.transposed, product.axis, product.describe()
        (('layout', 'a', 'b'), True, -1, 'BlockSparseMatmul(dds, transpose_b, Relu())')
        >>> layout = kl.blocksparse.block_diagonal(32, block=16)
        >>> kl.run_kernel(product, layout, torch.ones(1, 32), torch.ones(2, 16, 16))[0, ::16]
        tensor([16., 16.])
    """

    family: ClassVar[str] = "blocksparse"

    mode: str
    _: KW_ONLY
    transpose_a: bool = False
    transpose_b: bool = False
    epilogue: Epilogue | tuple[Epilogue, ...] = ()
    precision: str | None = None
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is

    def __post_init__(self):
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {shown(self.mode)}")
        for name in ("transpose_a", "transpose_b"):
            check_flag(name, getattr(self, name))
        object.__setattr__(self, "epilogue", as_epilogues(self.epilogue, summands=True))
        require(
            not (self.mode == "sdd" and self.vectors),
            "mode 'sdd' takes no epilogue with a value for each feature, as Bias has: its result "
            "are blocks",
        )
        check_precision(self.precision)
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)  # a str computes its hash once

    def __reduce__(self):
        names = ("transpose_a", "transpose_b", "epilogue", "precision")
        return partial(type(self), **{name: getattr(self, name) for name in names}), (self.mode,)

    @property
    def operands(self) -> tuple[str, ...]:
        return "layout", "a", "b"

    @property
    def transposed(self) -> bool:
        """Whether the sparse operand is S's transpose."""
        return {"sdd": False, "dsd": self.transpose_a, "dds": self.transpose_b}[self.mode]

    @property
    def axis(self) -> int:
        """The dimension of a dense result that is a line of op(S), and holds its features."""
        return -2 if self.mode == "dsd" else -1

    def describe(self) -> str:
        flags = [name for name in ("transpose_a", "transpose_b") if getattr(self, name)]
        parts = [self.mode, *flags, *(str(epilogue) for epilogue in self.epilogue)]
        return f"BlockSparseMatmul({', '.join(parts)})"
