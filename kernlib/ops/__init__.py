"""One module a family: check tensors, lower, allocate, launch. Found by the descriptor's family."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from kernlib import events
from kernlib.descriptors.base import Descriptor

_ops: dict[type, ModuleType] = {}


def op_of(descriptor: Descriptor) -> ModuleType:
    """The module that implements a descriptor's family. Raises TypeError for anything else."""
    op = _ops.get(type(descriptor))
    if op is None:
        if not isinstance(descriptor, Descriptor):
            raise TypeError(
                f"descriptor must be a kernlib descriptor such as Pairwise(), got {descriptor!r}"
            )
        op = import_module(f"kernlib.ops.{descriptor.family}")
        _ops[type(descriptor)] = op
    return op


def run_kernel(descriptor: Descriptor, *tensors, debug: bool = False, **arguments):
    """Run the kernel that ``descriptor`` describes on ``tensors`` and return its output.

    The family's own module says which tensors and keyword arguments it takes: for
    :class:`kernlib.Pairwise` see :func:`kernlib.ops.pairwise.run`. CUDA tensors run on their
    device, on torch's current stream, without waiting for the device; the kernel is compiled at
    most once and then kept in the cache. CPU tensors are computed in plain PyTorch. ``debug=True``
    writes one line an event (lookup, hit, compile, launch ...) to stderr.

    Raises TypeError and ValueError for bad arguments, UnsupportedError for devices without kernels,
    CompileError, and CaptureError for a kernel that is missing inside a CUDA graph's capture.
    """
    op = _ops.get(type(descriptor)) or op_of(descriptor)
    if debug:
        with events.on_stderr():
            return op.run(descriptor, *tensors, **arguments)
    return op.run(descriptor, *tensors, **arguments)


def prepare(descriptor: Descriptor, *tensors, debug: bool = False, **arguments) -> None:
    """Compile and load what :func:`run_kernel` would use for these arguments, and launch nothing.

    After it the same call, on any stream, may be captured in a CUDA graph. Does nothing for CPU
    tensors. Raises what :func:`run_kernel` raises.
    """
    if debug:
        with events.on_stderr():
            return op_of(descriptor).prepare(descriptor, *tensors, **arguments)
    return op_of(descriptor).prepare(descriptor, *tensors, **arguments)
