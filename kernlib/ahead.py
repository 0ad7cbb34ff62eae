"""Compiling before anybody calls: for any target, on machines without a GPU."""

from __future__ import annotations

import torch

from kernlib import events
from kernlib.descriptors.base import Descriptor
from kernlib.jit import service, targets
from kernlib.jit.entry import Entry
from kernlib.ops import op_of


def compile(
    descriptors: Descriptor | list[Descriptor],
    *,
    archs: str | tuple[str, ...] | list[str] = ("sm_90a",),
    specs: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    dtypes: torch.dtype | tuple[torch.dtype, ...] = (torch.float32,),
    debug: bool = False,
    **arguments,
) -> list[Entry]:
    """Compile kernels into the cache, for GPUs that need not be here.

    With ``specs`` (tensors as for :func:`kernlib.run_kernel`; their data is not read, so ``meta``
    ones will do) and the call's ``arguments``, the kernels which that call uses on the largest GPU
    of each arch; without, every variant of each descriptor for inputs of ``dtypes``: some 36 for a
    descriptor without Power stages, hundreds with them, a quarter of a second each.

    Returns the entries in order. Raises ValueError for an unknown arch, TypeError and ValueError
    for bad arguments, CompileError, and UnsupportedError when no compiler is installed.
    """
    if debug:
        with events.on_stderr():
            return compile(descriptors, archs=archs, specs=specs, dtypes=dtypes, **arguments)
    if specs is None and arguments:
        raise TypeError(f"{', '.join(arguments)}: arguments of a call need its specs")
    targeted = [targets.check_arch(arch) for arch in _several(archs)]
    return [
        service.build(spec, arch)
        for descriptor in _several(descriptors)
        for arch in targeted
        for spec in _wanted(descriptor, arch, specs, _several(dtypes), arguments)
    ]


def _several(value) -> tuple:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _wanted(descriptor: Descriptor, arch: str, specs, dtypes: tuple, arguments: dict) -> list:
    op = op_of(descriptor)
    if specs is None:
        try:
            return op.variants(descriptor, arch, dtypes)
        except KeyError as error:
            raise TypeError(f"dtypes: {descriptor.family} has no kernels for {error}") from None
    tensors = _several(specs)
    if len(tensors) > 2 or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise TypeError(f"specs must be the tensors of one call, got {len(tensors)}: {specs!r}")
    return op.specs(descriptor, arch, tensors, arguments)
