"""Storage derived from a frozen weight, such as its dense matrix, kept while that stays as it was.

Of a weight that requires a gradient nothing is kept. A frozen one has changed when torch's version
counter says so, or when it is other memory, another dtype, device or shape. Writes that pass the
counter by, as those through ``weight.data`` do, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch._C import _is_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


class Kept(NamedTuple):
    stamp: tuple
    memory: StorageWeakRef  # so that no other memory can have its identity
    value: torch.Tensor


def derived(
    kept: dict[Hashable, Kept],
    place: Hashable,
    name: str,
    make: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
) -> torch.Tensor | None:
    """``make(weight)``, from ``kept[place]`` if that was made of this very weight by this ``name``.

    None where nothing may be kept: of a weight that requires a gradient, and in a call that is
    compiled, traced, transformed or captured in a graph, which must neither leave its values to
    others nor depend on theirs.
    """
    if not _may_keep(weight):
        return None
    memory = weight.untyped_storage()
    stamp = (
        name, weight._version, weight.data_ptr(), weight.dtype, weight.device, weight.shape,
        weight.stride(), _stream(weight.device),
    )  # fmt: skip
    found = kept.get(place)
    if found is not None and found.stamp == stamp and found.memory.cdata == memory._cdata:
        return found.value
    with torch.inference_mode(False), torch.no_grad():
        value = make(weight)
    kept[place] = Kept(stamp, StorageWeakRef(memory), value)
    return value


def ordinary(*tensors: torch.Tensor) -> bool:
    """Whether these are tensors with memory, of torch's own kinds, in a call that runs now: none
    that is compiled, traced, transformed, or computed with fake tensors."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or _is_tracing():
        return False
    return all(
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and not t.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        for t in tensors
    )


def _may_keep(weight: torch.Tensor) -> bool:
    # A weight that trains changes in ways no counter sees: fused optimizers, replayed graphs.
    if not ordinary(weight) or weight.requires_grad:
        return False
    if weight.is_inference():  # such a tensor counts no versions
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _stream(device: torch.device) -> int:
    """The stream that a value is made on: another one would have to wait for it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
