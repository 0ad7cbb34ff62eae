"""The front door: a descriptor's family is found by name, and runs the call."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _is_tracing
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib import events
from kernlib.descriptors.base import Descriptor
from kernlib.runtime.tensors import check_flag

if TYPE_CHECKING:
    from kernlib.families.sparse.matrix import SparseMatrix

# The modules that register operators.
_LIBRARIES = {
    "kronecker_sparse_library": "kronecker_sparse.library",
    "pairwise_library": "pairwise.library",
    "pairwise_reduce_library": "pairwise.reductions.library",
    "sparse_library": "sparse.library",
}
_ops: dict[type, ModuleType] = {}


def op_of(descriptor: Descriptor) -> ModuleType:
    """The module that implements a descriptor's family. Raises TypeError for anything else."""
    op = _ops.get(type(descriptor))
    if op is None:
        _check_descriptor(descriptor)
        op = import_module(f"kernlib.families.{descriptor.family}.operation")
        _ops[type(descriptor)] = op
    return op


def _check_descriptor(descriptor) -> None:
    if not isinstance(descriptor, Descriptor):
        raise TypeError(
            f"descriptor must be a kernlib descriptor such as Pairwise(), got {descriptor!r}"
        )


def __getattr__(name: str):
    """The modules that register operators, imported when first asked for: Dynamo follows an
    attribute of a module where it refuses ``import_module``."""
    if name in _LIBRARIES:
        return import_module(f"kernlib.families.{_LIBRARIES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _library_of(descriptor: Descriptor) -> ModuleType:
    """The module that runs a family by way of ``torch.library``."""
    from kernlib import run

    _check_descriptor(descriptor)
    return getattr(run, f"{descriptor.family}_library")


def register_operators() -> None:
    """Register the operators that exported programs call, as a process must that loads one.

    Whoever traces or compiles a call has them without this.
    """
    for name in _LIBRARIES.values():
        import_module(f"kernlib.families.{name}")


def run_kernel(
    descriptor: Descriptor,
    *tensors: torch.Tensor | SparseMatrix,
    debug: bool = False,
    **arguments: Any,
) -> torch.Tensor:
    """Run the kernel that ``descriptor`` describes on ``tensors`` and return its output.

    The family's own module says which tensors and keyword arguments it takes: for
    :class:`kernlib.Pairwise` see :func:`kernlib.families.pairwise.operation.run`. CUDA tensors run
    on their device, on torch's current stream, without waiting for the device; the kernel is
    compiled at most once and then kept in the cache. CPU tensors are computed in plain PyTorch.
    ``debug=True`` writes one line an event (lookup, hit, compile, launch ...) to stderr.

    Raises TypeError and ValueError for bad arguments, UnsupportedError for devices without kernels,
    CompileError, and CaptureError for a kernel that is missing inside a CUDA graph's capture.

    ``torch.compile``, ``torch.export``, ``make_fx``, ``torch.jit.trace`` and fake tensors see one
    operator of ``torch.library``, so ``fullgraph=True`` holds. A number is a constant of what they
    make, which torch.compile makes anew for another (8 times by default): pass what changes as a
    tensor.
    """
    if debug is not False:
        check_flag("debug", debug)
    # Dynamo, a mode of the dispatcher (fake tensors, make_fx, non-strict export), torch.jit.trace.
    # With torch.compiler.is_compiling in place of the first two, 45 ns would be 120, and fake
    # tensors and make_fx not seen.
    if is_dynamo_compiling() or is_in_torch_dispatch_mode() or _is_tracing():
        return _library_of(descriptor).run(descriptor, *tensors, debug=debug, **arguments)
    op = _ops.get(type(descriptor)) or op_of(descriptor)
    if debug:
        with events.on_stderr():
            return op.run(descriptor, *tensors, **arguments)
    return op.run(descriptor, *tensors, **arguments)
