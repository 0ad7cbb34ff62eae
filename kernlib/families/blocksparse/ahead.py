"""What is done with block-sparse operations before anybody calls them: which kernels they use, and
their plans with those loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse import checks, plans
from kernlib.families.blocksparse.attention import ahead as attention
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.gradients import parts, terms
from kernlib.families.blocksparse.lowering import choose
from kernlib.families.blocksparse.product import PRODUCT, calls
from kernlib.families.blocksparse.scaled import ahead as scaled
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.softmax import ahead as softmax
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered
from kernlib.runtime import ahead
from kernlib.runtime.ahead import Request
from kernlib.runtime.arguments import autocast, check_names, readable
from kernlib.runtime.candidates import Candidates
from kernlib.runtime.devices import arch_of, load, model
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import Call

SIZES = (16, 32, 64, 128)  # of blocks
Descriptor = BlockSparseMatmul | BlockSparseScaledMatmul | BlockSparseSoftmax | BlockSparseAttention
OTHERS = {  # which have their own
    BlockSparseScaledMatmul: scaled,
    BlockSparseSoftmax: softmax,
    BlockSparseAttention: attention,
}


def _request(descriptor: BlockSparseMatmul, tensors: tuple, arguments: dict) -> Request:
    """A call as autocast would have it."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    check_names(descriptor, rest)
    checks.check_kinds(descriptor, tensors)
    layout, a, b = tensors
    (a, b), parameters = readable(*autocast((a, b), rest))
    return Request(descriptor, (layout, a, b), out, parameters)


def prepare(descriptor: Descriptor, *tensors, **arguments) -> None:
    """Build the plan of a call, compiling and loading its kernels, and load those of the gradients
    that would be recorded; see :func:`kernlib.prepare`."""
    if type(descriptor) in OTHERS:
        return OTHERS[type(descriptor)].prepare(descriptor, *tensors, **arguments)
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if call.device.type == "meta":
        raise UnsupportedError("tensors on meta are on no GPU to prepare: see kernlib.compile")
    if PRODUCT.way(call, *request) == REFERENCE:
        return
    ahead.plan_of(calls, parts, request, call)
    device = request.operands[1].get_device()
    for lower in _lowerings(request, call, arch_of(device), device)[1:]:
        for spec in lower(model(device).multiprocessors).specs:
            load(spec, device)


def prepared(descriptor: Descriptor, *tensors, **arguments) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launches, or torch
    computes it. One whose gradient would be recorded is never: its kernels are looked for each
    time."""
    if type(descriptor) in OTHERS:
        return OTHERS[type(descriptor)].prepared(descriptor, *tensors, **arguments)
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if PRODUCT.way(call, *request) == REFERENCE:
        return True
    return ahead.prepared(calls, parts, request)


def specs(
    descriptor: Descriptor,
    arch: str,
    tensors: tuple,
    arguments: dict,
    device: int | None = None,
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``layout.to("meta")`` and ``meta`` ones will do)
    uses on the GPUs of an arch, untuned, or on ``device`` alone, as it is tuned, if it is given;
    with those of the gradients that would be recorded."""
    if type(descriptor) in OTHERS:
        return OTHERS[type(descriptor)].specs(descriptor, arch, tensors, arguments, device)
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if call.dtype not in KERNEL_TYPES:
        return []
    fewest, most = targets.MULTIPROCESSORS[arch]
    if device is not None:
        fewest = most = model(device).multiprocessors
    made = (
        lower(count).specs
        for lower in _lowerings(request, call, arch, device)
        for count in range(fewest, most + 1)
    )
    return list(dict.fromkeys(spec for found in made for spec in found))


def _lowerings(
    request: Request, call: Call, arch: str, device: int | None
) -> list[Callable[[int], Lowered]]:
    """The launches of a call, for a number of multiprocessors; with a gradient recorded those of
    the gradients too, of a contiguous gradient of the result."""

    def product(descriptor, operands, out, parameters, call: Call) -> Callable[[int], Lowered]:
        problem, _ = plans.problem_of(call, descriptor, operands, out, parameters)
        if not plans.is_for_kernels(call, problem):
            return lambda _: Lowered(())
        if device is not None:
            return lambda _: plans.lower(descriptor, problem, device)
        return lambda count: choose.lower(descriptor.epilogue, problem, arch, count)

    fused = request.fused(parts)
    found = [product(*fused, call)]
    if not request.recorded():
        return found
    layout, a, b = fused.operands
    grad = torch.empty(call.out_shape, dtype=call.dtype, device="meta")
    given = {"grad": grad, "a": a.to("meta"), "b": b.to("meta")}
    for term, operand in zip(terms(fused.descriptor), request.operands[1:], strict=True):
        if not operand.requires_grad:
            continue
        operands = layout.to("meta"), given[term.left], given[term.right]
        of_term = checks.check_call(term.descriptor, operands, None, {})
        found.append(product(term.descriptor, operands, None, {}, of_term))
    return found


def variants(
    descriptor: Descriptor,
    arch: str,
    dtypes: tuple[torch.dtype, ...],
) -> list[KernelSpec]:
    """Every kernel that lowering can choose, untuned, for a descriptor, its gradients included,
    inputs of ``dtypes`` and square blocks of any size; none for float64. Raises KeyError for other
    dtypes."""
    if type(descriptor) in OTHERS:
        return OTHERS[type(descriptor)].variants(descriptor, arch, dtypes)
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    precision = None
    if descriptor.precision is not None:
        precision = plans.kernel_precision(descriptor.precision, torch.float32)
    made = dict.fromkeys((descriptor, parts(descriptor).product))
    made |= dict.fromkeys(term.descriptor for term in terms(descriptor))
    found = [
        spec
        for each in made
        for size in SIZES
        for spec in choose.variants(each.epilogue, each.mode, (size, size), names, arch, precision)
    ]
    return list(dict.fromkeys(found))


def candidates(descriptor: Descriptor, *tensors, **arguments) -> Candidates:
    """The kernels that could compute a call, none for an empty result; see :func:`kernlib.tune`.

    Raises what a call raises, and UnsupportedError for tensors that are on no GPU.
    """
    if type(descriptor) in OTHERS:
        return OTHERS[type(descriptor)].candidates(descriptor, *tensors, **arguments)
    from kernlib.families.blocksparse.candidates import candidates as candidates_of

    return candidates_of(_request(descriptor, tensors, arguments))
