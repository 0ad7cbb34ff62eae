"""Torch-Blocksparse's names and signatures over kernlib's kernels:
``import kernlib.compat.torch_blocksparse as torch_blocksparse``.

A layout is a tensor of 0 and 1 ``[H, rows / block, cols / block]``, of the sparse operand as it is
stored; values are ``[Z, nnz, block, block]``, blocks in the order of ``layout.nonzero()``; dense
tensors are ``[Z, H, rows, cols]``. What differs is what Torch-Blocksparse refuses or gets wrong:

- blocks of 128 too, bfloat16 and float64, any size to sum over, any strides and offsets;
- sums in one order, the same each time, of rows with few blocks and of heads and layouts without;
- gradients of one operand alone, gradients of gradients, torch.compile, torch.vmap, CUDA graphs:
  nothing waits for the device;
- values ``[nnz, block, block]`` stand for all of Z;
- softmax leaves x alone unless ``inplace=True``, divides in float32, takes rows of any length, and
  has gradients of ``rpe`` and masks; rows that nothing is left of are 0;
- each module of attention has its own layouts, lengths of keys may differ from those of queries,
  and ``add_bias_kv`` and ``add_zero_attn`` raise instead of misaligning masks;
- ``bench`` is taken and means nothing: time calls with ``torch.cuda.Event``.

``Linear`` and ``replace_mha``, broken there, work here. ``BatchNorm2d`` is not there.

Example:
    >>> import kernlib.compat.torch_blocksparse as torch_blocksparse
    >>> layout = torch.tensor([[[1, 0], [0, 1]]])  # of one head: blocks on the diagonal
    >>> op = torch_blocksparse.MatMul(layout, 16, "dsd")  # values (Z, nnz, 16, 16) by a matrix
    >>> values, x = torch.eye(16).expand(1, 2, 16, 16), torch.randn(1, 1, 32, 8)
    >>> torch.equal(op(values, x), x)
    True
"""

from importlib import import_module as _import_module

_NAMES = {
    "kernlib.compat.torch_blocksparse.attention": (
        "DeepSpeedSparseSelfAttention",
        "MultiheadAttention",
        "SparsityInfo",
        "make_layout",
        "replace_mha",
    ),
    "kernlib.compat.torch_blocksparse.elementwise": ("Permute", "ReLU"),
    "kernlib.compat.torch_blocksparse.layers": ("BlockSparseLinear", "Conv2d", "Linear"),
    "kernlib.compat.torch_blocksparse.matmul": ("MatMul", "Softmax"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
