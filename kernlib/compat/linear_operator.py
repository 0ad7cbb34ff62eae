"""GPyTorch's Kronecker products by kernlib: :func:`enable` once, or ``with enabled(): ...``, and no
model changes.

``KroneckerProductLinearOperator`` of the linear_operator package, on which GPyTorch stands, has two
functions, ``_matmul`` and ``_t_matmul``, that compute each product with ``K1 ⊗ ... ⊗ KN`` and with
its transpose. While it is enabled, :func:`kernlib.kron_matmul` computes them if every factor is a
``DenseLinearOperator`` and all tensors are dense, on the CPU or on one CUDA GPU, and float32,
float16, bfloat16 or float64. All other calls go to linear_operator's own functions: factors with a
structure (identity, diagonal, triangular, Toeplitz, sums, lazily evaluated ones), integers and
complex numbers, sparse and empty tensors, and whatever linear_operator refuses. Shapes, dtypes,
batches and gradients of the results are the same either way; half types are summed in float32 and
rounded once, not once a factor.

:func:`status` counts both kinds of calls, with the reasons of the latter. Of a multitask model,
whose covariance of tasks is a sum, the solves and the log determinants are computed here, as they
multiply by dense eigenvectors, and products with the covariance itself by linear_operator. Up to
``gpytorch.settings.max_cholesky_size`` GPyTorch makes most matrices dense, and multiplies by few.

linear_operator is imported when :func:`enable` is called, and not before. The FastKron project
proposes the same to linear_operator, in its pull request 103.

Example:
    >>> import kernlib.compat.linear_operator as kron
    >>> kron.enable()  # doctest: +SKIP
    >>> product = linear_operator.operators.KroneckerProductLinearOperator(  # doctest: +SKIP
    ...     linear_operator.to_linear_operator(a), linear_operator.to_linear_operator(b))
    >>> y, status = product @ x, kron.status()  # doctest: +SKIP
    >>> status  # doctest: +SKIP
    Status(enabled=True, answered=1, fell_back=0, reasons={})
    >>> kron.disable()
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.families.kronecker_product.matmul import kron_matmul
from kernlib.runtime.dtypes import FLOAT_TYPES
from kernlib.runtime.tensors import stand_ins

__all__ = ["Status", "disable", "enable", "enabled", "status"]

PACKAGE = "linear_operator"
MODULE = "linear_operator.operators.kronecker_product_linear_operator"
NAMES = {"_matmul": False, "_t_matmul": True}  # and whether the factors are transposed
DEVICES = ("cpu", "cuda")

Function = Callable[[Sequence[Any], torch.Size, torch.Tensor], torch.Tensor]


class Status(NamedTuple):
    """What :func:`status` returns. Counts begin anew when the functions are replaced; calls in a
    graph of ``torch.compile`` are not counted.

    - ``enabled``: whether the functions are replaced.
    - ``answered``, ``fell_back``: calls that kernlib computed, and those that linear_operator's own
      functions did.
    - ``reasons``: why, and how often.
    """

    enabled: bool
    answered: int  # calls that kernlib computed
    fell_back: int  # those that linear_operator's own functions did
    reasons: dict[str, int]  # why, and how often


class _Swap:
    """One replacement of linear_operator's functions. Each swap has functions of its own, which
    call those that they replace: so another library's patch around them never calls itself."""

    def __init__(self, module: ModuleType, dense: type):
        self.module, self.dense, self.active = module, dense, True
        self.found: dict[str, Function] = {name: getattr(module, name) for name in NAMES}
        self.placed = {name: self._function(name) for name in NAMES}
        for name, function in self.placed.items():
            setattr(module, name, function)

    def undo(self) -> None:
        """Put the original functions back. Another library's patch since then stays and calls
        the original."""
        self.active = False
        for name, function in self.placed.items():
            if getattr(self.module, name) is function:
                setattr(self.module, name, self.found[name])

    def _function(self, name: str) -> Function:
        original, turned = self.found[name], NAMES[name]

        @functools.wraps(original)
        def product(linear_ops, kp_shape, rhs):
            if not self.active:
                return original(linear_ops, kp_shape, rhs)
            reason = _misfit(self.dense, linear_ops, kp_shape, rhs, turned)
            _count(reason)
            if reason is not None:
                return original(linear_ops, kp_shape, rhs)
            factors = [op.tensor.mT if turned else op.tensor for op in linear_ops]
            return kron_matmul(rhs, factors, side="left")

        return product


_lock = threading.RLock()  # of what follows
_kept = False  # by enable()
_blocks = 0  # of enabled() that are open, in all threads
_swap: _Swap | None = None
_calls: Counter[str | None] = Counter()  # by why they were not answered, None for those that were


def enable() -> None:
    """Compute linear_operator's Kronecker products by kernlib from now on, in all threads. A second
    call changes nothing.

    Raises ImportError where linear_operator is not installed, or has no such functions.
    """
    module = _module()
    global _kept
    with _lock:
        _place(module)
        _kept = True


def disable() -> None:
    """The end of :func:`enable`: linear_operator's own functions are back, once no block of
    :func:`enabled` is open in any thread. Without an :func:`enable` it changes nothing."""
    global _kept
    with _lock:
        _kept = False
        _remove()


@contextmanager
def enabled() -> Iterator[None]:
    """``with enabled(): ...``, or a decorator: enabled inside, in all threads, and afterwards as it
    was before. Blocks may be nested, and overlap in several threads. Raises ImportError as
    :func:`enable` does."""
    module = _module()
    global _blocks
    with _lock:
        _place(module)
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            _remove()


def status() -> Status:
    """Whether it is enabled, and the calls since it last became so: those answered by kernlib, and
    those left to linear_operator, with the reasons."""
    with _lock:
        calls, on = dict(_calls), _swap is not None
    answered = calls.pop(None, 0)
    reasons = {str(reason): count for reason, count in calls.items()}
    return Status(on, answered, sum(reasons.values()), reasons)


def _place(module: ModuleType) -> None:
    global _swap
    if _swap is None:
        _swap = _Swap(module, import_module(f"{PACKAGE}.operators").DenseLinearOperator)
        _calls.clear()


def _remove() -> None:
    global _swap
    if _swap is not None and not _kept and not _blocks:
        _swap.undo()
        _swap = None


def _count(reason: str | None) -> None:
    if not is_dynamo_compiling():
        with _lock:
            _calls[reason] += 1


def _renew_lock() -> None:
    """In a forked child, where a thread that is not there any more may have held it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _module() -> ModuleType:
    """linear_operator's, with the functions as they are known. Raises ImportError."""
    try:
        module = import_module(MODULE)
    except ModuleNotFoundError as error:
        if not MODULE.startswith(error.name or PACKAGE):  # of what linear_operator itself needs
            raise
        raise ImportError(
            "kernlib.compat.linear_operator needs linear_operator: pip install linear_operator, or "
            "gpytorch, which brings it",
            name=error.name,
        ) from None
    for name in NAMES:
        function: Any = getattr(module, name, None)
        try:
            inspect.signature(function).bind("linear_ops", "kp_shape", "rhs")
        except (TypeError, ValueError):  # no function, or one of other arguments
            raise ImportError(
                f"{MODULE} has no {name}(linear_ops, kp_shape, rhs) to replace: install "
                "linear_operator 0.5 or 0.6, which have",
                name=MODULE,
            ) from None
    return module


# The calls that are answered.


def _misfit(dense: type, linear_ops, kp_shape, rhs, turned: bool) -> str | None:
    """Why linear_operator has to compute a call, or None."""
    for op in linear_ops:
        if type(op) is not dense:  # a derived class may multiply in its own way
            return f"a factor is a {type(op).__name__}"
    factors = [op.tensor for op in linear_ops]
    return _unlike(rhs, factors) or _unfit(factors, tuple(kp_shape), rhs, turned)


def _unlike(rhs, factors: list[torch.Tensor]) -> str | None:
    """Why kernlib does not multiply these tensors."""
    if not isinstance(rhs, torch.Tensor):
        return f"the right-hand side is a {type(rhs).__name__}"
    if rhs.dtype not in FLOAT_TYPES:
        return f"the dtype is {rhs.dtype}"
    if rhs.device.type not in DEVICES:
        return f"the device is {rhs.device.type}"
    for tensor in (rhs, *factors):
        if tensor.dtype != rhs.dtype or tensor.device != rhs.device:
            return "dtypes or devices differ"
        if tensor.layout != torch.strided or tensor.is_nested:
            return "a tensor is not dense"
    if not is_dynamo_compiling() and stand_ins(rhs, *factors):
        return "a tensor stands for another"  # of several devices, or of a graph that is recorded
    return None


def _unfit(factors: list[torch.Tensor], shape: tuple, rhs, turned: bool) -> str | None:
    """Why shapes are not those of a product with this operator."""
    rows = math.prod([f.shape[-2] for f in factors])
    columns = math.prod([f.shape[-1] for f in factors])
    batch = shape[:-2]
    if shape[-2:] != (rows, columns) or any(f.shape[:-2] != batch for f in factors):
        return "the factors are not of the operator's shape"
    if rhs.dim() < 2 or rhs.shape[-2] != (rows if turned else columns):
        return "the right-hand side does not fit"
    if not rows * columns * rhs.numel() * math.prod(batch):
        return "a tensor is empty"
    pairs = zip(reversed(batch), reversed(rhs.shape[:-2]), strict=False)
    if any(size != other and 1 not in (size, other) for size, other in pairs):
        return "the right-hand side does not fit"
    return None
