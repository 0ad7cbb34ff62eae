"""The sparse op: products of tensors with compressed matrices.

The steady state is a dict hit: signature to plan, fresh pointers into the plan's blocks, launch.
Everything else (checks, lowering, loading) happens when a signature is new. CPU tensors are
computed by the reference, on the matrix laid out densely.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.epilogues import Bias, Epilogue, as_epilogues
from kernlib.families.sparse import checks, reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.tensors import check_frozen, check_place
from kernlib.jit.spec import KernelSpec
from kernlib.run import run_kernel
from kernlib.runtime import devices
from kernlib.runtime.arguments import (
    autocast,
    check_device,
    kind_of,
    no_autocast,
    parameter_ranges,
    parameters_of,
    positive,
    refuse_out_of_recorded,
    requires_gradient,
    tensors_of,
)
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    check_dense,
    is_lazy,
    ranges_meet,
    refuse_any_overlap,
    refuse_overlap,
    signature,
    stand_ins,
)

if TYPE_CHECKING:
    from kernlib.families.sparse.plans import SparsePlan
    from kernlib.runtime.candidates import Candidates

_plans = PlanCache()
_PLAIN, _BIASED = SparseMatmul(), SparseMatmul((Bias(),))


def matmul(
    w: SparseMatrix,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue | tuple[Epilogue, ...] = (),
    out: torch.Tensor | None = None,
    **parameters: float | torch.Tensor,
) -> torch.Tensor:
    """``y[..., r] = epilogue(sum_c W[r, c] * x[..., c] + bias[r])`` for a compressed matrix.

    ``x`` (..., C), ``bias`` (R,) or None, the result (..., R) as from
    ``torch.nn.functional.linear``; ``epilogue`` of :mod:`kernlib.descriptors.epilogues` with one
    keyword argument for each of its parameters. It is :func:`kernlib.run_kernel` of a
    :class:`SparseMatmul`, and raises what :func:`kernlib.families.sparse.operation.run` does. The
    model is MACKO-SpMV's ``multiply``.
    """
    if bias is None:
        descriptor = _descriptor(epilogue, False) if epilogue else _PLAIN
        return run_kernel(descriptor, w, x, out=out, **parameters)
    descriptor = _descriptor(epilogue, True) if epilogue else _BIASED
    return run_kernel(descriptor, w, x, out=out, bias=bias, **parameters)


def _descriptor(epilogue, bias: bool) -> SparseMatmul:
    epilogue = as_epilogues(epilogue)
    whole = (Bias(), *epilogue) if bias else epilogue
    return SparseMatmul(whole) if is_dynamo_compiling() else _made(whole)


_made = lru_cache(maxsize=256)(SparseMatmul)  # which Dynamo does not look into


def run(
    descriptor: SparseMatmul,
    w: SparseMatrix,
    x: torch.Tensor,
    /,
    *more,
    out: torch.Tensor | None = None,
    **parameters: float | torch.Tensor,
) -> torch.Tensor:
    """``y[..., r] = epilogue(sum_c W[r, c] * x[..., c])``, the sums in float32.

    - ``w``: a :class:`SparseMatrix` (R, C), as :func:`kernlib.sparse.compress` makes.
    - ``x`` (..., C) of any strides and any number of leading dimensions, none included, of w's
      dtype and on its device. Autocast casts it, and vectors of the epilogue, to w's dtype.
    - ``out``: (..., R) of any strides, written in place; without it a new contiguous tensor.
    - One argument for each parameter of the epilogue: ``bias`` a tensor (R,), scalars as real
      numbers or tensors of shape () that stay on the device and are not looked at there.

    On a GPU up to 16 vectors are multiplied by the format's own kernels, which read the matrix
    once; more of them, and matrices in the dense format, by cuBLAS, on a matrix that is laid out
    for the call: then epilogues other than a bias follow on the rounded product.

    Infinite and NaN entries of x: formats "bitmap" and "dense", and whatever cuBLAS or the CPU
    computes, multiply them by zeros as well, which gives NaN; "u8", "u4", "u2" and "macko"
    skip entries that are not stored. What lies behind x in memory never matters.

    Gradients of x and of the epilogue's parameters are recorded, those of x by the matrix's
    transpose, and those of the gradients; then an activation is not fused with the product but
    applied to its rounded result, so that the gradient is exact. The matrix is a constant. The
    model is the MACKO-SpMV project.

    Raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.
    """
    if more:
        raise TypeError(f"{descriptor.describe()} takes w and x, got {2 + len(more)} operands")
    if type(w) is not SparseMatrix:
        checks.check_matrix(w)
    if torch._C._is_any_autocast_enabled():
        if out is not None:
            refuse_any_overlap(out, x=x, **parameters)  # which casts would hide
        (x,), parameters = autocast((x,), parameters, w.dtype)
    recorded = torch.is_grad_enabled() and requires_gradient(parameters.values(), x, out)
    if recorded or forward_ad._current_level >= 0:
        return _run_recorded(descriptor, w, x, out, parameters)
    return execute(descriptor, w, x, out, parameters)


def _run_recorded(descriptor: SparseMatmul, w, x, out, parameters: dict) -> torch.Tensor:
    """A call whose derivatives torch wants to know."""
    refuse_out_of_recorded(out)
    eager = forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()
    if eager:
        from kernlib.families.sparse import gradients

        known = gradients.known(descriptor, w, x, parameters)
        if known is not None:
            return known
    if stand_ins(x, *w.operands):
        from kernlib.families.sparse import library

        return library.run(descriptor, w, x, **parameters)
    call = checks.check_call(descriptor, w, x, out, parameters)
    if forward_ad._current_level >= 0 or by_reference(call, x, parameters):
        return _reference(descriptor, w, x, out, parameters)
    if eager:
        return gradients.recorded(descriptor, w, x, parameters)
    from kernlib.families.sparse import operators

    return operators.recorded(descriptor, w, x, parameters)


def by_reference(call: checks.Call, *tensors) -> bool:
    """Whether torch computes a checked call: all but those on CUDA, and those inside a transform of
    torch.func other than vmap. Raises UnsupportedError for devices that have no backend."""
    check_device(call.device)
    return call.device.type != "cuda" or _is_differentiated() or any(map(_is_legacy, tensors))


def _is_differentiated() -> bool:
    """Whether a transform of torch.func other than vmap is active: those of operators that take
    lists of tensors end in an error."""
    functorch = torch._C._functorch
    if not torch._C._are_functorch_transforms_active():
        return False
    found = [interpreter.key() for interpreter in functorch.get_interpreter_stack() or ()]
    return any(kind != functorch.TransformType.Vmap for kind in found)


def _is_legacy(value) -> bool:
    """Whether ``is_grads_batched`` made a tensor, or one of several."""
    if isinstance(value, dict):
        return any(map(_is_legacy, value.values()))
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return isinstance(value, torch.Tensor) and is_batched(value)


def is_transformed(*values) -> bool:
    """Whether a tensor is inside a transform of torch.func."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(value, torch.Tensor) and wrapped(value) for value in values)


def _reference(descriptor: SparseMatmul, w, x, out, parameters: dict) -> torch.Tensor:
    """A checked call by torch's own operators, which are differentiable as they are."""
    from kernlib.families.sparse.plans import laid_out

    if w.frozen:
        check_frozen(w)
    if out is not None and not out.is_meta:
        refuse_overlap(out, x=x, **tensors_of(parameters), **_operands(w))
    with no_autocast(x):
        y = reference.sparse_matmul(descriptor, laid_out(w), x, parameters)
    return y if out is None else out.copy_(y)


def execute(descriptor: SparseMatmul, w: SparseMatrix, x, out, parameters: dict) -> torch.Tensor:
    """A call as it is given: without autocast, and without a record of gradients."""
    key = _key(descriptor, w, x, out, parameters)
    plan = _plans.plans.get(key)
    if plan is None:
        return _first(key, descriptor, w, x, out, parameters)
    return by_plan(plan, descriptor, w, x, out, parameters)


def by_plan(plan: SparsePlan, descriptor, w, x, out, parameters: dict) -> torch.Tensor:
    """A call by its plan."""
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return by_plan(plan, descriptor, w, x, out, parameters)
    if w._frozen is not None:
        check_frozen(w)
    addresses = [t.data_ptr() for t in w._operands]
    if addresses != w._addresses:
        check_place(w, addresses)
    vectors = numbers = kept = ()
    if parameters:
        vectors, numbers, kept = parameters_of(plan, descriptor, x, parameters)
    target = None
    if out is not None:
        target = _target(plan, w, x, out, parameters)
    if plan.launch is None:
        return _by_cublas(plan, descriptor, w, x, out, vectors, numbers, kept)
    if plan.copy is not None:
        x = plan.copy(x)
    if target is None:
        target = plan.result()
    addresses = [*addresses, x.data_ptr(), target.data_ptr()]
    for vector in vectors:
        addresses.append(vector.data_ptr())
    plan.launch(addresses, numbers)
    del kept  # converted tensors: the stream orders the reuse of their memory behind the launch
    if out is None or out is target:
        return target
    return out.copy_(target)


def _by_cublas(
    plan: SparsePlan, descriptor, w, x, out, vectors: Sequence, numbers: Sequence, kept: Sequence
) -> torch.Tensor:
    """A call of many vectors or of a dense matrix."""
    if not plan.columns:
        return plan.result() if out is None else out
    tensors = iter(kept)  # those of scalars that have an address, in order
    values = dict(zip(plan.vectors, vectors, strict=True))
    for index, name in enumerate(plan.scalars):
        values[name] = next(tensors) if numbers[2 * index + 1] else numbers[2 * index]
    y = plan.multiply(descriptor, w, x, values)
    return y if out is None else out.copy_(y)


def _first(key, descriptor, w, x, out, parameters: dict) -> torch.Tensor:
    """A call that has no plan: one of a new signature, or one that takes none."""
    if stand_ins(x, out, *w.operands, *parameters.values()):
        from kernlib.families.sparse import library

        return library.run(descriptor, w, x, out=out, **parameters)
    call = checks.check_call(descriptor, w, x, out, parameters)
    if by_reference(call, x, out, parameters):
        return _reference(descriptor, w, x, out, parameters)
    if is_transformed(x, out, *parameters.values()):
        from kernlib.families.sparse import operators

        y = operators.called(descriptor, w, x, parameters)
        return y if out is None else out.copy_(y)
    if any(map(is_lazy, (x, *tensors_of(parameters).values()))):
        if out is not None:
            refuse_any_overlap(out, x=x, **parameters)
        (x,), parameters = positive((x,), parameters)
        return execute(descriptor, w, x, out, parameters)
    make_plan(descriptor, w, x, out, parameters, call)
    return execute(descriptor, w, x, out, parameters)


def make_plan(descriptor: SparseMatmul, w, x, out, parameters: dict, call) -> None:
    """Make and keep the plan of a checked call on CUDA tensors, its kernels loaded."""
    from kernlib.families.sparse import plans

    key = _key(descriptor, w, x, out, parameters)
    _plans.keep(key, plans.plan(descriptor, call, w, x, out, parameters))


def find_plan(descriptor: SparseMatmul, w, x, out, parameters: dict) -> SparsePlan | None:
    """The plan of a call if it is kept."""
    return _plans.plans.get(_key(descriptor, w, x, out, parameters))


def _operands(w: SparseMatrix) -> dict[str, torch.Tensor]:
    """The matrix's tensors by what an error calls them."""
    return {f"w.tensors[{name!r}]": tensor for name, tensor in w.tensors.items()}


def _key(descriptor: SparseMatmul, w: SparseMatrix, x, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor, the matrix's layout and device and whether it is
    frozen, then shapes, strides, dtypes, device, alignment and kinds of numbers. None where there
    can be no plan."""
    try:  # signature(x), in 0.1 us less
        key = (
            descriptor, w._key,
            x.shape, x.stride(), x.dtype, x.get_device(),
            p & 15 if (p := x.data_ptr()) >= LOWEST_ADDRESS else ~p, x.is_neg(),
        )  # fmt: skip
        if out is not None:
            key += signature(out)
        if parameters:
            for name, value in parameters.items():
                key += (name, kind_of(value))
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):
        check_dense(("x",), x=x, out=out)
        return None
    return key


def _target(plan: SparsePlan, w, x, out, parameters: dict) -> torch.Tensor | None:
    """Where the kernel writes: ``out``, or None, a new tensor, where its leading dimensions are not
    one of strides. Raises ValueError for an ``out`` that shares memory with an argument as it was
    given, copied for the kernel or not."""
    ranges = [(x.data_ptr(), plan.spans[0])]
    if parameters:
        ranges += parameter_ranges(plan, plan.spans[1:], parameters)
    ranges += [(t.data_ptr(), t.numel() * t.element_size()) for t in w.operands]
    if ranges_meet(out.data_ptr(), plan.out_span, ranges):
        refuse_overlap(out, x=x, **tensors_of(parameters), **_operands(w))
    if plan.apart:
        return None
    if not out.is_inference():  # those have no version to count
        torch.autograd.graph.increment_version(out)
    return out


# What does without calls is in a module of its own, which those do not load.


def prepare(descriptor: SparseMatmul, *tensors, **arguments) -> None:
    """Build the plan of a call, compiling and loading its kernels, and load those of its gradient,
    with the transpose it takes, where one would be recorded; see :func:`kernlib.prepare`."""
    from kernlib.families.sparse import ahead

    ahead.prepare(ahead.request(descriptor, tensors, arguments))


def prepared(descriptor: SparseMatmul, *tensors, **arguments) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launches. One whose
    gradient would be recorded is never: its kernels are looked for each time."""
    from kernlib.families.sparse import ahead

    return ahead.prepared(ahead.request(descriptor, tensors, arguments))


def specs(
    descriptor: SparseMatmul, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``w.to("meta")`` and ``meta`` ones will do) uses
    on the GPUs of an arch, or on ``device`` alone. Those of its gradient are among them where one
    would be recorded and the transpose is known."""
    from kernlib.families.sparse import ahead

    return ahead.specs(ahead.request(descriptor, tensors, arguments), arch, device)


def variants(
    descriptor: SparseMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, matrices of ``dtypes`` and any
    format; none for float64. Raises KeyError for other dtypes."""
    from kernlib.families.sparse import ahead

    return ahead.variants(descriptor, arch, dtypes)


def choices(descriptor: SparseMatmul, *tensors, **arguments) -> Candidates:
    """The one kernel of a call, none where cuBLAS computes it; see :func:`kernlib.tune`. Raises
    what :func:`run` raises, and UnsupportedError for tensors that are on no GPU."""
    from kernlib.families.sparse import ahead

    return ahead.choices(ahead.request(descriptor, tensors, arguments))
