"""What every family asks of its tensors: their kind, the memory they lie in, and the signature by
which a plan is found again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy as is_uninitialized

from kernlib import sharding
from kernlib.descriptors.base import shown

MAX_EXACT_OVERLAP = 1 << 26  # elements up to which two interleaved views are compared one by one
# No GPU memory lies below 4 GiB. An address there is the offset of a view of a tensor that has no
# memory. Such a view with an offset of 4 GiB or more is not recognised.
LOWEST_ADDRESS = 1 << 32
# Subclasses of torch's whose memory does not hold their values, and what to do.
APART = {
    "CausalBias": (
        "whose memory holds nothing; blocksparse.scaled_dot_product_attention takes it as "
        "attn_mask, elsewhere use causal=True or a mask of bools"
    ),
    "MaskedTensor": "in which some values are none; pass its get_data(), or to_tensor(value)",
}


# What :func:`signature` raises for anything but such a tensor; TypeError for a class.
UNREADABLE = (AttributeError, RuntimeError, NotImplementedError, TypeError, ValueError)


def signature(t: torch.Tensor) -> tuple:
    """All of a tensor that a plan depends on: shape, strides, dtype, device, alignment, negation.

    Raises one of ``UNREADABLE`` for what is no such tensor; :func:`check_dense` and
    :func:`refuse_transforms` then say so in the caller's words.
    """
    # Fake and zero tensors have no memory. Their alignment is below 0 here, so that they do not
    # find the plan of a real tensor. _is_zerotensor() would take another 0.1 us, and does not know
    # fake tensors.
    address = t.data_ptr()
    alignment = address & 15 if address >= LOWEST_ADDRESS else ~address
    return t.shape, t.stride(), t.dtype, t.get_device(), alignment, t.is_neg()


def is_lazy(*tensors: torch.Tensor | None) -> bool:
    """Whether the memory of one of these does not hold its values: a lazily negated view, or a zero
    tensor, which autograd makes for undefined gradients and which has no memory."""
    result = False
    for t in tensors:  # any() over a generator would double the time
        result = result or (t is not None and (t.is_neg() or t._is_zerotensor()))
    return result


def materialised(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of a lazy one whose memory holds the values."""
    return t.clone() if t._is_zerotensor() else t.resolve_neg()


def normal(t):
    """A tensor that may be saved for a gradient: a copy of one that was made in inference mode."""
    return t.clone() if isinstance(t, torch.Tensor) and t.is_inference() else t


def as_device(device: object, advice: str = "") -> torch.device:
    """A device of torch, which may not be there. Raises TypeError, with ``advice``, for what is no
    device, such as a dtype, ValueError for a text that names none."""
    if type(device) not in (torch.device, str, int):
        raise TypeError(f"device must be a torch.device, str or int, got {shown(device)}{advice}")
    try:
        return torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ValueError(f"device must be one of torch's, got {shown(device)}") from error


def as_backend_device(device: object, advice: str = "") -> torch.device:
    """:func:`as_device` of those that kernlib computes on, and meta. Raises ValueError for
    others."""
    device = as_device(device, advice)
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"device must be a CPU, a CUDA device or meta, got {device}")
    return device


def check_dense(required: tuple[str, ...], /, **tensors: object) -> None:
    """Raises TypeError for an argument that is neither a dense tensor nor None, and for None if its
    name is in ``required``."""
    for name, tensor in tensors.items():
        if tensor is None and name not in required:
            continue
        if not isinstance(tensor, torch.Tensor):
            refuse_other(name, tensor)
        check_layout(name, tensor)


def refuse_other(name: str, value: object, wanted: str = "a tensor") -> NoReturn:
    """Raises TypeError for what is no tensor, and names the line that would make it one."""
    from kernlib.hints.descriptors import instead_of_tensor  # only errors need it

    raise TypeError(f"{name} must be {wanted}, got {instead_of_tensor(name, value)}")


def refuse_proxy(error: ValueError) -> None:
    """Raises TypeError in place of the error that a Proxy of torch.fx raises when it is looked at;
    nothing for other errors."""
    if type(error).__name__ == "TraceError":
        from kernlib.hints.descriptors import TRACED

        raise TypeError(f"an argument must be a tensor, got Proxy; {TRACED}") from None


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that is not stored as its values, with a stride for each
    dimension."""
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one; pad it, or pass parts")
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor, got layout {tensor.layout}; pass its to_dense()"
        )
    if not is_dynamo_compiling() and is_uninitialized(tensor):
        raise TypeError(f"{name} must be a dense tensor, got a parameter without its values yet")
    if tensor.is_quantized:
        raise TypeError(f"{name} must be a dense tensor, got {tensor.dtype}; dequantize() it")
    if type(tensor) is not torch.Tensor:
        for kind, advice in APART.items():
            if is_of(tensor, kind):
                raise TypeError(f"{name} must be a dense tensor, got a {kind}, {advice}")


def is_of(tensor: torch.Tensor, kind: str) -> bool:
    """Whether a tensor is of torch's class of this name, which need not be imported."""
    cls = type(tensor)
    return cls.__name__ == kind and cls.__module__.startswith("torch.")


def stand_ins(*tensors) -> bool:
    """Whether one of these has no memory here but stands for a tensor that has: a fake tensor
    outside its mode, a functional one, one with a dispatcher of its own."""
    own, functional = torch.Tensor.__torch_dispatch__, torch._is_functional_tensor
    for t in tensors:  # any() over a generator would double the time
        if isinstance(t, torch.Tensor) and (type(t).__torch_dispatch__ is not own or functional(t)):
            sharding.notice(type(t))
            return True
    return False


def refuse_transforms(advice: str, /, **tensors) -> None:
    """Raises RuntimeError for a tensor inside a transform of torch.func.

    ``advice`` ends the sentence "... is inside a transform of torch.func (vmap, grad ...), which":
    it says which kernels do not support that, and what to call instead.
    """
    for name, tensor in tensors.items():
        if tensor is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise RuntimeError(
                f"{name} is inside a transform of torch.func (vmap, grad ...), which {advice}"
            )


def refuse_distributed(**tensors) -> None:
    """Raises TypeError for DTensors in a call that is no operator of torch."""
    for name, tensor in tensors.items():
        if tensor is not None and is_of(tensor, "DTensor"):
            raise TypeError(
                f"{name} is a DTensor, which this call does not take: pass "
                f"{name}.full_tensor(), or have each process call it by "
                "torch.distributed.tensor.experimental.local_map"
            )


def is_wrapped(value) -> bool:
    """Whether this is a tensor inside of a transform of torch.func, or one that
    ``is_grads_batched`` made."""
    functorch = torch._C._functorch
    return isinstance(value, torch.Tensor) and (
        functorch.is_functorch_wrapped_tensor(value) or functorch.is_legacy_batchedtensor(value)
    )


def is_differentiated() -> bool:
    """Whether a transform of torch.func other than vmap is active."""
    return any(kind != torch._C._functorch.TransformType.Vmap for kind in _transforms())


def takes_derivatives() -> bool:
    """Whether a transform of torch.func is active that computes derivatives."""
    kinds = torch._C._functorch.TransformType
    return any(kind in (kinds.Grad, kinds.Jvp) for kind in _transforms())


def _transforms() -> list:
    if not torch._C._are_functorch_transforms_active():
        return []
    return [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]


def is_mapped(*values) -> bool:
    """Whether torch.vmap maps over one of these, and no other transform is active."""
    if not torch._C._are_functorch_transforms_active() or is_differentiated():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(value, torch.Tensor) and wrapped(value) for value in values)


def common_batch(sizes: dict[str, int]) -> int:
    """The batch that arguments of these broadcast to, 1 of none. Raises ValueError when two
    differ."""
    batch = 1
    for size in sizes.values():  # no set: symbols have no hash
        if size != 1:
            if batch != 1 and size != batch:
                listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
                raise ValueError(f"batches must be 1 or equal, got {listed}")
            batch = size
    return batch


def check_out_shape(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless ``out`` has ``shape``."""
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out must have shape {tuple(shape)}, got {tuple(out.shape)}")


def check_memory(out: torch.Tensor) -> None:
    """Raises ValueError for an ``out`` that no kernel can write: a zero tensor, a negated view, one
    whose elements share memory, or one of inference mode outside of it."""
    if out._is_zerotensor():
        raise ValueError(
            "out is a zero tensor, as autograd makes for undefined gradients, and has no memory; "
            "pass out.clone()"
        )
    if out.is_neg():
        raise ValueError("out is a negated view (such as x.conj().imag); pass a tensor of its own")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "out was made in inference mode, outside of which nothing may write it; clone it"
        )
    if overlaps_itself(out):
        raise ValueError(
            f"out overlaps itself (shape {tuple(out.shape)}, strides {out.stride()}): elements "
            "that share memory cannot all be written; clone it"
        )


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a tensor share memory. Exact for views made by slicing, transposing
    and expanding; for others the answer may wrongly be True."""
    dims = sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def span(t: torch.Tensor) -> int:
    """Bytes from the beginning of the first element to the end of the last."""
    if t.numel() == 0:
        return 0
    last = sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))
    return (last + 1) * t.element_size()


def ranges_meet(out_address: int, out_span: int, ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether the range of memory of ``out`` meets one of ``ranges``, each the address and span of
    an input."""
    end, met = out_address + out_span, False
    for address, length in ranges:  # any() over a generator would double the time
        met = met or (out_address < address + length and address < end)
    return met


def refuse_overlap(out: torch.Tensor, /, **inputs: torch.Tensor) -> None:
    """Raises ValueError when ``out`` shares memory with an input."""
    if out.is_meta:  # all meta tensors begin at 0
        return
    for name, tensor in inputs.items():
        if tensor.numel() and out.numel() and _share_memory(tensor, out):
            raise ValueError(f"out shares memory with {name}; give it memory of its own")


def refuse_any_overlap(out, /, **given) -> None:
    """:func:`refuse_overlap` for arguments as the caller gave them, before they are copied: later
    checks would only see the copies. Values that are no tensors, or have no memory here, are
    ignored. Cheap where no argument is near ``out``."""
    if out is None or is_dynamo_compiling():
        return
    try:
        first = out.data_ptr()
        last = first + span(out) if first else 0  # fake tensors begin at 0
        near = {
            name: t
            for name, t in given.items()
            if isinstance(t, torch.Tensor)
            and t.device == out.device
            and t.data_ptr() < last
            and t.data_ptr() + span(t) > first
        }
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):
        return  # no tensor with memory: others say so, or write nothing in place
    if near:
        refuse_overlap(out, **near)


def refuse_partial_overlap(out, /, **given) -> None:
    """:func:`refuse_any_overlap` for arguments each of which may be ``out`` itself."""
    if out is not None and not is_dynamo_compiling():
        apart = {name: value for name, value in given.items() if not is_itself(value, out)}
        refuse_any_overlap(out, **apart)


def is_itself(value, out: torch.Tensor) -> bool:
    """Whether a value is a tensor that broadcasts to ``out`` and has each element at the address
    where ``out`` has it: then a thread that reads an element and writes it disturbs no other
    thread."""
    if not isinstance(value, torch.Tensor) or value.dim() > out.dim() or value.dtype != out.dtype:
        return False
    try:
        if value.data_ptr() != out.data_ptr() or value.device != out.device:
            return False
        behind = out.dim() - value.dim()
        sizes, strides = (1,) * behind + value.shape, (0,) * behind + value.stride()
    except (AttributeError, RuntimeError, NotImplementedError):
        return False  # it has no memory
    ours = zip(sizes, strides, strict=True)
    theirs = zip(out.shape, out.stride(), strict=True)
    return all(n == 1 or pair == (n, step) for pair, (n, step) in zip(ours, theirs, strict=True))


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two views share an element. That is told by their ranges of memory; by their columns,
    if both step over the same rows; else by marking each element on the host; and where that would
    take too much memory, it is assumed."""
    if not ranges_meet(y.data_ptr(), span(y), [(x.data_ptr(), span(x))]):
        return False
    if _in_other_columns(x, y):
        return False
    base = min(x.data_ptr(), y.data_ptr())
    # Memory of others, as of numpy, may be aligned to less than its elements.
    unit = math.gcd(x.element_size(), y.element_size(), x.data_ptr() - y.data_ptr())
    extent = max(t.data_ptr() + span(t) for t in (x, y)) - base
    steps = [_steps(t) for t in (x, y)]
    count = max(math.prod(sizes) for sizes, _ in steps)
    if max(extent // unit, count) > MAX_EXACT_OVERLAP:
        return True
    bytes_of = []
    for t, (sizes, strides) in zip((x, y), steps, strict=True):
        marks = torch.zeros(extent // unit + 1, dtype=torch.bool, device="cpu")
        scale = t.element_size() // unit
        strides = [stride * scale for stride in strides]
        for part in range(scale):
            offset = (t.data_ptr() - base) // unit + part
            marks.as_strided(sizes, strides, offset).fill_(True)
        bytes_of.append(marks)
    return bool((bytes_of[0] & bytes_of[1]).any())


def _steps(t: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of a view without those that lead to memory which others lead to: an
    expanded dimension may have more entries than can be marked."""
    steps = [(n, step) for n, step in zip(t.shape, t.stride(), strict=True) if n > 1 and step]
    return [n for n, _ in steps], [step for _, step in steps]


def _in_other_columns(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both are matrices with the same distance in bytes from row to row, whose columns do
    not meet."""
    if x.dim() != 2 or y.dim() != 2:
        return False
    pitch, other = (t.stride(0) * t.element_size() for t in (x, y))
    if pitch != other or not pitch:  # expanded rows all lie in one place
        return False
    widths = [span(t[:1]) for t in (x, y)]
    starts = [(t.data_ptr() - min(x.data_ptr(), y.data_ptr())) % pitch for t in (x, y)]
    ends = [start + width for start, width in zip(starts, widths, strict=True)]
    return max(ends) <= pitch and (ends[0] <= starts[1] or ends[1] <= starts[0])


def refuse_gradients(task: str, /, **values) -> None:
    """Raises RuntimeError, naming the argument, if one is a tensor that requires a gradient while
    gradients are recorded, which ``task`` does not do."""
    if not torch.is_grad_enabled():
        return
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, which {task} does not record: pass {name}.detach(), "
                "or call under torch.no_grad()"
            )


# Shapes.


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """As ``torch.broadcast_shapes``. The first call of that in a process imports sympy, which takes
    0.3 s, so it is called only where sizes are symbols, and under Dynamo, which has loaded sympy
    anyway. Raises RuntimeError for shapes that do not broadcast."""
    if is_dynamo_compiling() or any(type(size) is not int for shape in shapes for size in shape):
        return torch.broadcast_shapes(*shapes)
    rank = max(map(len, shapes), default=0)
    sizes = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if sizes[axis] == 1:
                sizes[axis] = size
            elif size not in (1, sizes[axis]):
                shown = ", ".join(str(tuple(s)) for s in shapes)
                raise RuntimeError(f"shapes do not broadcast: {shown}")
    return torch.Size(sizes)


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """All dimensions but the last as one: by reshape, as is_grads_batched knows no flatten."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
