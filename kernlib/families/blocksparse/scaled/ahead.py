"""What is done with scaled block-sparse products before anybody calls them: which kernels they use,
and their plans with those loaded."""

from __future__ import annotations

import torch

from kernlib.canonical import encode
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering import hopper, scaled
from kernlib.families.blocksparse.scaled import plans
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.scaled.product import PRODUCT, calls
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.ahead import Request
from kernlib.runtime.arguments import check_names
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import Call


def _request(descriptor: BlockSparseScaledMatmul, tensors: tuple, given: dict) -> Request:
    rest = dict(given)
    out = rest.pop("out", None)
    check_names(descriptor, rest)
    PRODUCT.check_operands(descriptor, tensors)
    return Request(descriptor, tensors, out, rest)


def _problem(request: Request, call: Call):
    """None where torch computes."""
    if request.recorded() or not call.batch:
        return None
    return plans.problem_of(call, request.descriptor, request.operands, request.out)


def prepare(descriptor: BlockSparseScaledMatmul, *tensors, **given) -> None:
    """Build the plan of a call, compiling and loading its kernel; see :func:`kernlib.prepare`."""
    request = _request(descriptor, tensors, given)
    call = request.check(PRODUCT)
    if call.device.type == "meta":
        raise UnsupportedError("tensors on meta are on no GPU to prepare: see kernlib.compile")
    if PRODUCT.way(call, *request) == REFERENCE or request.recorded():
        return
    if calls.find(*request) is None:
        calls.make(call, *request)


def prepared(descriptor: BlockSparseScaledMatmul, *tensors, **given) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launch, or torch
    computes it."""
    request = _request(descriptor, tensors, given)
    call = request.check(PRODUCT)
    if PRODUCT.way(call, *request) == REFERENCE or request.recorded():
        return True
    return calls.find(*request) is not None


def specs(
    descriptor: BlockSparseScaledMatmul,
    arch: str,
    tensors: tuple,
    given: dict,
    device: int | None = None,
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``layout.to("meta")`` and ``meta`` ones will do)
    uses on the GPUs of an arch, or on ``device`` alone if it is given."""
    request = _request(descriptor, tensors, given)
    found = _problem(request, request.check(PRODUCT))
    fewest, most = targets.MULTIPROCESSORS[arch]
    if device is not None:
        fewest = most = model(device).multiprocessors
    counts = range(fewest, most + 1)
    made = (spec for count in counts for spec in plans.lower(found, arch, count).specs)
    return list(dict.fromkeys(made))


def variants(
    descriptor: BlockSparseScaledMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, whose inputs are of float8 whatever
    ``dtypes`` are: none but on sm_90a, and where the sum runs along rows of stored blocks."""
    if arch != hopper.ARCH or descriptor.transposed != (descriptor.mode == "dds"):
        return []
    return scaled.variants(descriptor.out_dtype)


def candidates(descriptor: BlockSparseScaledMatmul, *tensors, **given) -> Candidates:
    """The one kernel of a call, none for what torch computes on the GPU; see :func:`kernlib.tune`.

    Raises what a call raises, and UnsupportedError for tensors that are on no GPU.
    """
    request = _request(descriptor, tensors, given)
    call = request.check(PRODUCT)
    if call.device.type != "cuda" or PRODUCT.way(call, *request) == REFERENCE:
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and torch computes this product on "
            f"{call.device}; move the tensors to a CUDA device"
        )
    device, found = request.operands[1].get_device(), _problem(request, call)
    lowered = plans.lower(found, arch_of(device), model(device).multiprocessors)
    if not lowered.steps:
        return Candidates(device, b"", [])

    def ready():
        out = request.operands[3].new_empty(call.out_shape, dtype=call.dtype)
        scratch = request._replace(out=out)
        calls.execute(*scratch)
        return lambda: calls.execute(*scratch)

    main = max(lowered.specs, key=lambda spec: spec.shared_bytes)
    only = Candidate({"kind": scaled.KIND}, main, ready)
    return Candidates(device, encode((descriptor.family, "scaled", found[0])), [only])
