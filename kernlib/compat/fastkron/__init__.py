"""FastKron's names and signatures over :func:`kernlib.kron_matmul`:
``import kernlib.compat.fastkron.fastkrontorch as fk``, or ``fastkronnumpy`` for numpy arrays.

Functions, argument order and result shapes are those of pyfastkron 1.1. What differs is what
FastKron gets wrong, and what it refuses:

- ``alpha``, ``beta`` and ``y`` count with a gradient to record too, and have gradients themselves;
- ``y`` broadcasts to the result in all of its dimensions, of any strides; with ``beta=0`` it is not
  read;
- gradients of operands of any strides, gradients of gradients, torch.compile, torch.vmap, ``out=``;
- each factor broadcasts on its own, and each may be a transposed view, read where it lies;
- no rows, any number of factors, and factors of one dimension are taken; no factors are refused;
- results keep their dimensions of size 1;
- float16 and bfloat16 are computed in float32, like those of :func:`kernlib.kron_matmul`. Integers
  and complex numbers, which FastKron takes by a slower way without a word, raise TypeError;
- tuples of factors, parameters and subclasses of tensors are taken by every function.

A factor of one dimension is a column of ``gemkm`` and a row of ``gekmm``; where all of them have
one, the result lacks the dimension of size 1 that they make, as that of a product of a matrix and a
vector does.

Example:
    >>> import kernlib.compat.fastkron.fastkrontorch as fk
    >>> x, f = torch.ones(1, 4), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> fk.gemkm(x, [f, f])
    tensor([[16., 24., 24., 36.]])
"""

from importlib import import_module as _import_module

__all__ = ["fastkronnumpy", "fastkrontorch"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    return _import_module(f"kernlib.compat.fastkron.{name}")


def __dir__() -> list[str]:
    return __all__
