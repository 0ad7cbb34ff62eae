"""Storage derived from a frozen weight, such as its dense matrix, kept while that stays as it was.

Torch does not count every write to a weight: not those by fused optimizers, ``weight.data``, NumPy,
DLPack, storages, collectives and replays of graphs. So its version counter alone cannot show that a
weight is unchanged. A weight on the CPU is compared with a copy at each call, which takes a small
part of the time of deriving. Elsewhere that would wait for the device, and nothing is kept, unless
the owner promises not to write the weight. Under a promise the counter and the place in memory are
compared.

Nothing is kept for a weight that requires a gradient."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch._C import _is_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


class Kept(NamedTuple):
    stamp: tuple
    memory: StorageWeakRef | None  # under a promise: so that no other memory can have its identity
    copy: torch.Tensor | None  # of the weight, where there is no promise
    value: torch.Tensor


def derived(
    entries: dict[Hashable, Kept],
    place: Hashable,
    name: str,
    make: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    promised: bool = False,
) -> torch.Tensor | None:
    """``make(weight)``, from ``kept[place]`` if that was made of this very weight by this ``name``.

    ``promised``: whether the owner of the weight says that nobody writes it.

    None where nothing may be kept, and then ``kept[place]`` is dropped, as what happens to a weight
    in the meantime is not known: of a weight that requires a gradient or, under a promise, has one;
    without a promise of a weight that is not on a CPU; and in a call that is traced, transformed or
    captured in a graph, which must neither leave its values to others nor depend on theirs. A call
    that is compiled drops nothing, as Dynamo would have to guard what is kept.
    """
    if torch.compiler.is_compiling():
        return None
    if not _may_keep(weight, promised):
        entries.pop(place, None)
        return None
    stamp = _stamp(name, weight, promised)
    entry = entries.get(place)
    if entry is not None and entry.stamp == stamp and _holds(entry, weight):
        return entry.value
    with torch.inference_mode(False), torch.no_grad():
        copy = memory = None
        if promised:
            memory = StorageWeakRef(weight.untyped_storage())
        else:  # and the value may be a view of it
            weight = copy = weight.clone()
        entries[place] = Kept(stamp, memory, copy, make(weight))
    return entries[place].value


def ordinary(*tensors: torch.Tensor) -> bool:
    """Whether these are tensors with memory, of torch's own kinds, in a call that runs now: not
    compiled, traced, transformed or computed with fake tensors."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or _is_tracing():
        return False
    return all(
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and not t.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        for t in tensors
    )


def _may_keep(weight: torch.Tensor, promised: bool) -> bool:
    if not ordinary(weight) or weight.requires_grad:
        return False
    if not promised:
        return weight.device.type == "cpu"
    # A gradient is what training leaves behind, by replays of its graph too. A tensor of inference
    # mode counts no versions.
    if weight.grad is not None or weight.is_inference():
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _stamp(name: str, weight: torch.Tensor, promised: bool) -> tuple:
    stamp = name, weight.dtype, weight.device, weight.shape
    if not promised:
        return stamp
    place = weight.data_ptr(), weight.stride(), _stream(weight.device)
    return *stamp, weight._version, *place


def _holds(entry: Kept, weight: torch.Tensor) -> bool:
    """Whether an entry was derived from these values: by comparison with its copy, or by their
    memory."""
    if entry.copy is not None:
        return torch.equal(entry.copy, weight)
    return entry.memory.cdata == weight.untyped_storage()._cdata


def _stream(device: torch.device) -> int:
    """The stream that a value is made on: another one would have to wait for it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
