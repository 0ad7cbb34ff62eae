"""``run_kernel``: a descriptor's family is found by its name, and runs the call."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _is_tracing
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib import events
from kernlib.descriptors.base import Descriptor, check_flag, refuse_descriptor
from kernlib.families import OPERATORS
from kernlib.runtime.tensors import refuse_proxy

if TYPE_CHECKING:
    from kernlib.families.blocksparse.layout import Layout
    from kernlib.families.sparse.matrix import SparseMatrix

_runs: dict[type, Callable] = {}


def run_of(descriptor: Descriptor) -> Callable:
    """The function that runs calls of a descriptor. Raises TypeError for what is no descriptor."""
    runs = operation_of(descriptor).RUNS
    run = next(run for kind, run in runs.items() if isinstance(descriptor, kind))
    _runs[type(descriptor)] = run
    return run


def operation_of(descriptor: Descriptor) -> ModuleType:
    """The module ``operation`` of a descriptor: it runs calls, and answers what
    :mod:`kernlib.ahead` asks of them. Raises TypeError for what is no descriptor."""
    _check_descriptor(descriptor)
    name = f"{descriptor.package}.operation" if descriptor.package else "operation"
    return import_module(f"kernlib.families.{descriptor.family}.{name}")


def _check_descriptor(descriptor) -> None:
    if not isinstance(descriptor, Descriptor):
        refuse_descriptor("kernlib descriptor such as Pairwise()", descriptor)


def __getattr__(name: str):
    """``<name>_operators``: one of OPERATORS, imported when it is first asked for. Dynamo can trace
    an attribute of a module, but not ``import_module``."""
    family = name.removesuffix("_operators")
    if family != name and family in OPERATORS:
        return import_module(f"kernlib.families.{OPERATORS[family]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _operators_of(descriptor: Descriptor) -> ModuleType:
    """The module that runs a family by way of ``torch.library``."""
    from kernlib import run

    _check_descriptor(descriptor)
    return getattr(run, f"{descriptor.family}_operators")


def register_operators() -> None:
    """Register the operators that exported programs call. A process that loads such a program must
    call this first.

    A process that traces or compiles a call itself need not: the call registers them.

    Example:
        >>> kl.register_operators()
        >>> hasattr(torch.ops.kernlib, "pairwise")
        True
    """
    for name in OPERATORS.values():
        import_module(f"kernlib.families.{name}")


def run_kernel(
    descriptor: Descriptor,
    *tensors: torch.Tensor | Layout | SparseMatrix,
    debug: bool = False,
    **arguments: Any,
) -> torch.Tensor:
    """Run the kernel that ``descriptor`` describes on ``tensors`` and return its output.

    ``descriptor.signature`` shows the call that a descriptor takes, and ``help`` of its class has
    shapes, dtypes and errors. These are the calls of each class. ``...`` stands for one argument
    for each parameter of the epilogue, such as ``bandwidth``, ``bias`` or ``scale``:

    - :class:`kernlib.Pairwise`, such as ``gaussian()``: ``run_kernel(descriptor, a, b, *, p,
      inner_p, outer_p, inner_scale, ..., epsilon=0.0, regularization=0.0, row_offset=0,
      col_offset=0, feature_map=None, lengthscale=None, a_codes, b_codes, tables, out=None,
      accumulate=False)``. The exponents and ``inner_scale`` belong to stages, ``epsilon`` and
      ``regularization`` to epilogues, and codes and tables to ``categories``. Points a (M, K) and
      b (N, K) give (M, N).
    - :class:`kernlib.Formula`: ``run_kernel(descriptor, *, ..., out=None)`` with the tensors that
      it names, some of (M, K) or (M,) and some of (N, K) or (N,), gives (M, N). Those that are
      called a and b may be passed by place.
    - :class:`kernlib.KroneckerSparse`: ``run_kernel(descriptor, x, weight, *, ..., out=None)``, and
      :class:`kernlib.KroneckerSparseChain`: ``run_kernel(descriptor, x, *weights, ..., out=None)``.
      x (..., in_features) gives (..., out_features).
    - :class:`kernlib.KroneckerProduct`: ``run_kernel(descriptor, x, *factors, ..., out=None)``.
      x (..., M, in_features) gives (..., M, out_features).
    - :class:`kernlib.SparseMatmul`: ``run_kernel(descriptor, w, x, *, ..., out=None)`` with w by
      :func:`kernlib.sparse.compress`. x (..., C) gives (..., R).
    - :class:`kernlib.BlockSparseMatmul`: ``run_kernel(descriptor, layout, a, b, *, ...,
      out=None)`` with a :class:`kernlib.blocksparse.Layout`.
    - :class:`kernlib.BlockSparseScaledMatmul`: ``run_kernel(descriptor, layout, a, b, scale_a,
      scale_b, *, out=None)``, of float8.
    - :class:`kernlib.BlockSparseSoftmax`: ``run_kernel(descriptor, layout, x, *, rpe,
      key_padding_mask, attn_mask, scale=1.0, out=None)``, with those scores and masks that the
      descriptor names.
    - :class:`kernlib.BlockSparseAttention`: ``run_kernel(descriptor, layout, q, k, v, *, ...,
      scale=None, return_lse=False, out=None)``, with those of window, lengths, dropout and captured
      tensors that the descriptor names. q (B, H, LQ, E) gives (B, H, LQ, EV).

    Each call takes ``debug=False`` too. ``tensors`` are those in front of the ``*``, ``arguments``
    those behind it.

    Tensors are float32, float16, bfloat16 or float64, as far as the class takes them. CUDA tensors
    run on their device, on torch's current stream, without waiting for the device. The kernel is
    compiled at most once and then kept in the cache. CPU tensors are computed in plain PyTorch.
    ``debug=True`` writes a line to stderr for each event (lookup, hit, compile, launch ...), and
    for each call that torch computes.

    Raises TypeError and ValueError for bad arguments, UnsupportedError for devices without kernels,
    CompileError, and CaptureError for a kernel that is missing inside a CUDA graph's capture.

    ``torch.compile``, ``torch.export``, ``make_fx``, ``torch.jit.trace`` and fake tensors see one
    operator of ``torch.library``, so ``fullgraph=True`` works. They treat a number as a constant,
    and torch.compile compiles again for another one (8 times by default): pass what changes as a
    tensor.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> kl.run_kernel(kl.gaussian(), points, points, bandwidth=5.0)
        tensor([[1.0000, 0.6065], [0.6065, 1.0000]])
    """
    if debug is not False:
        check_flag("debug", debug)
    # Dynamo, a mode of the dispatcher (fake tensors, make_fx, non-strict export), torch.jit.trace:
    # in 45 ns. torch.compiler.is_compiling in place of the first two would make that 120, and would
    # not notice fake tensors and make_fx.
    if is_dynamo_compiling() or is_in_torch_dispatch_mode() or _is_tracing():
        return _operators_of(descriptor).run(descriptor, *tensors, debug=debug, **arguments)
    run = _runs.get(type(descriptor)) or run_of(descriptor)
    try:
        if debug:
            with events.on_stderr():
                return run(descriptor, *tensors, **arguments)
        return run(descriptor, *tensors, **arguments)
    except ValueError as error:
        refuse_proxy(error)
        raise
