"""What is done with Kronecker products before anybody makes them: which kernels they use, and their
plans with those loaded. Calls that record gradients are torch's, and have none."""

from __future__ import annotations

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product import checks, plans
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.lowering import choose
from kernlib.families.kronecker_product.product import PRODUCT, calls
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.ahead import Request
from kernlib.runtime.arguments import autocast, check_names, readable
from kernlib.runtime.candidates import Candidates
from kernlib.runtime.devices import model
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.operation import REFERENCE


def _request(descriptor: KroneckerProduct, tensors: tuple, arguments: dict) -> Request:
    """A call as autocast would have it, its vector as a matrix."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    check_names(descriptor, rest)
    checks.check_kinds(descriptor, tensors)
    if tensors[0].dim() == 1:
        tensors, out = checks.as_matrix(descriptor, tensors, out)
    operands, parameters = readable(*autocast(tensors, rest))
    return Request(descriptor, operands, out, parameters)


def prepare(descriptor: KroneckerProduct, *tensors, **arguments) -> None:
    """Build the plan of a call, compiling and loading its kernels; see :func:`kernlib.prepare`."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if request.recorded() or PRODUCT.way(call, *request) == REFERENCE:
        return
    if calls.find(*request) is None:
        calls.make(call, *request)


def prepared(descriptor: KroneckerProduct, *tensors, **arguments) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launches, or it needs
    none, as one that records gradients."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if request.recorded() or PRODUCT.way(call, *request) == REFERENCE:
        return True
    return calls.find(*request) is not None


def specs(
    descriptor: KroneckerProduct,
    arch: str,
    tensors: tuple,
    arguments: dict,
    device: int | None = None,
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``meta`` ones will do) uses on the GPUs of an
    arch, or on ``device`` alone, if it is given."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    takes = choose.takes(descriptor.shapes, DTYPE_NAMES[call.dtype], arch)
    if request.recorded() or not call.batch or not takes:
        return []
    problem, _, _ = plans.problem_of(descriptor, call, request.operands, request.out)
    fewest, most = targets.MULTIPROCESSORS[arch]
    if device is not None:
        fewest = most = model(device).multiprocessors
    counts = range(fewest, most + 1)
    made = (choose.lower(descriptor.epilogue, problem, arch, count).specs for count in counts)
    return list(dict.fromkeys(spec for found in made for spec in found))


def variants(
    descriptor: KroneckerProduct, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and inputs of ``dtypes``. Raises
    KeyError for dtypes that a call does not take."""
    names, given = [DTYPE_NAMES[dtype] for dtype in dtypes], ("fp32", "tf32")
    if descriptor.precision is not None:
        given = (plans.kernel_precision(descriptor.precision, torch.float32),)
    kinds = [(n, each) for n in names for each in (given if n == "float32" else ("fp32",))]
    inside = descriptor.side == "left"
    sizes = tuple(shape[::-1] if inside else shape for shape in descriptor.shapes)
    return choose.variants(descriptor.epilogue, sizes, inside, kinds, arch)


def candidates(descriptor: KroneckerProduct, *tensors, **arguments) -> Candidates:
    """Raises UnsupportedError: there is one kernel for each call, and nothing to choose from."""
    _request(descriptor, tensors, arguments).check(PRODUCT)
    raise UnsupportedError(
        "a KroneckerProduct has one kernel for each call, and there is nothing to tune"
    )
