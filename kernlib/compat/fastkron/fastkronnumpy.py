"""FastKron's functions of numpy arrays, in place of ``pyfastkron.fastkronnumpy``. PyTorch computes
them on the CPU, on the memory of the arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernlib.compat.fastkron import fastkrontorch
from kernlib.runtime.arguments import no_autocast

__all__ = ["gekmm", "gemkm"]

DTYPES = (np.float16, np.float32, np.float64)


def gemkm(
    x: np.ndarray,
    fs: Sequence[np.ndarray],
    alpha: float = 1.0,
    beta: float = 0.0,
    y: np.ndarray | None = None,
    *,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """``alpha * x (F1 ⊗ ... ⊗ FN) + beta * y``.

    Shapes and broadcasting of ``x``, the factors ``fs`` and ``y``, and ``alpha`` and ``beta``, are
    those of :func:`kernlib.compat.fastkron.fastkrontorch.gemkm`, dtypes float16, float32 and
    float64, one for all. Arrays are read where they lie, read-only ones too, and copied only where
    torch has no such strides: negative ones, parts of an element, and the other byte order. The
    result is a new array, or ``out``, which has its shape and dtype and may share memory with the
    others.

    Raises ValueError for shapes that do not fit, no factors, a mixture of dtypes, a ``beta``
    without y, and an ``out`` of another shape or dtype, read-only or overlapping itself; TypeError
    for what is no array, a masked one, and for other dtypes.
    """
    return _computed("right", x, fs, alpha, beta, y, out)


def gekmm(
    fs: Sequence[np.ndarray],
    x: np.ndarray,
    alpha: float = 1.0,
    beta: float = 0.0,
    y: np.ndarray | None = None,
    *,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """``alpha * (F1 ⊗ ... ⊗ FN) x + beta * y``, with the shapes of
    :func:`kernlib.compat.fastkron.fastkrontorch.gekmm`: the factors ``fs`` come first. ``out`` and
    everything else is as in :func:`gemkm`, and so are the errors that it raises."""
    return _computed("left", x, fs, alpha, beta, y, out)


def _computed(side: str, x, fs, alpha, beta, y, out) -> np.ndarray:
    if not isinstance(fs, (list, tuple)):
        raise TypeError(f"fs must be a list or tuple of factors, got {type(fs).__name__}")
    tensor = _tensor("x", x)
    factors = [_tensor(f"fs[{index}]", factor) for index, factor in enumerate(fs)]
    summand = None if y is None else _tensor("y", y)
    if out is not None:
        _check_out(out, x)
    with torch.no_grad(), no_autocast(tensor):
        if side == "right":
            result = fastkrontorch.gemkm(tensor, factors, alpha, beta, summand).numpy()
        else:
            result = fastkrontorch.gekmm(factors, tensor, alpha, beta, summand).numpy()
    if out is None:
        return result
    if out.shape != result.shape:
        raise ValueError(f"out must have shape {result.shape}, got {out.shape}")
    np.copyto(out, result)
    return out


def _tensor(name: str, array) -> torch.Tensor:
    """On the array's memory, wherever torch can have it so. Raises TypeError."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a numpy array, got {type(array).__name__}")
    native = array.dtype.newbyteorder("=")
    if native not in DTYPES:
        raise TypeError(f"{name} must be float16, float32 or float64, got {array.dtype}")
    addressable = [step >= 0 and step % array.itemsize == 0 for step in array.strides]
    if not (array.dtype.isnative and array.flags.aligned and all(addressable)):
        array = array.astype(native)
    if not array.flags.writeable:
        array = np.asarray(_Readable(array))
    return torch.from_numpy(array)


class _Readable:
    """The memory of a read-only array, of which torch would warn: nothing here writes it. A copy of
    what ``numpy.broadcast_to`` made could have any size."""

    def __init__(self, array: np.ndarray):
        self.array = array  # whose memory it is
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def _check_out(out, x: np.ndarray) -> None:
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out must be a numpy array, got {type(out).__name__}")
    if out.dtype != x.dtype:
        raise ValueError(f"out must be {x.dtype} as x is, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError("out must be an array that can be written, got a read-only one")
    reach = out.itemsize
    for step, size in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True)):
        if size > 1 and step < reach:
            raise ValueError(
                f"out must have memory for each element, got shape {out.shape} with strides "
                f"{out.strides}"
            )
        reach += step * (size - 1) if size > 1 else 0
