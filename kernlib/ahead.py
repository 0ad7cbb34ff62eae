"""Compiling before anybody calls: for any target, on machines without a GPU."""

from __future__ import annotations

import torch

from kernlib.descriptors.base import Descriptor
from kernlib.jit import service, targets
from kernlib.jit.entry import Entry
from kernlib.ops import op_of


def compile(
    descriptors: Descriptor | list[Descriptor],
    *,
    archs: tuple[str, ...] | list[str] = ("sm_90a",),
    specs: tuple[torch.Tensor, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    **arguments,
) -> list[Entry]:
    """Compile kernels into the cache, for GPUs that need not be here.

    With ``specs`` (tensors as for :func:`kernlib.run_kernel`; their data is not read, so ``meta``
    ones will do) and the call's ``arguments``, the kernels which that call uses; without, every
    variant of each descriptor for inputs of ``dtypes``.

    Returns the entries in order. Raises ValueError for an unknown arch, TypeError and ValueError
    for bad arguments, CompileError, and UnsupportedError when no compiler is installed.
    """
    several = descriptors if isinstance(descriptors, (list, tuple)) else [descriptors]
    entries = []
    for descriptor in several:
        op = op_of(descriptor)
        if specs is None and arguments:
            raise TypeError(f"{', '.join(arguments)}: arguments of a call need its specs")
        for arch in archs:
            targets.check_arch(arch)
            if specs is None:
                wanted = op.variants(descriptor, arch, tuple(dtypes))
            else:
                wanted = op.specs(descriptor, arch, tuple(specs), arguments)
            entries += [service.build(spec, arch) for spec in wanted]
    return entries
