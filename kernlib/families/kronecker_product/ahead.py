"""What is done with Kronecker products before anybody makes them: they are checked. Torch computes
them, so there is nothing to compile, to load or to tune."""

from __future__ import annotations

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product import checks
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.product import PRODUCT
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.ahead import Request
from kernlib.runtime.arguments import autocast, check_names
from kernlib.runtime.candidates import Candidates


def prepare(descriptor: KroneckerProduct, *tensors, **arguments) -> None:
    """Check a call; see :func:`kernlib.prepare`."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    check_names(descriptor, rest)
    checks.check_kinds(descriptor, tensors)
    if tensors[0].dim() == 1:
        other = -3 - descriptor.axis
        tensors = tensors[0].unsqueeze(other), *tensors[1:]
        out = None if out is None else out.unsqueeze(other)
    Request(descriptor, *_cast(tensors, out, rest)).check(PRODUCT)


def _cast(tensors: tuple, out, parameters: dict) -> tuple:
    operands, parameters = autocast(tensors, parameters)
    return operands, out, parameters


def prepared(descriptor: KroneckerProduct, *tensors, **arguments) -> bool:
    """True of every call that is none wrong; raises what the call raises."""
    prepare(descriptor, *tensors, **arguments)
    return True


def specs(
    descriptor: KroneckerProduct,
    arch: str,
    tensors: tuple,
    arguments: dict,
    device: int | None = None,
) -> list[KernelSpec]:
    """No kernels; raises what the call raises."""
    prepare(descriptor, *tensors, **arguments)
    return []


def variants(descriptor: KroneckerProduct, arch: str, dtypes: tuple) -> list[KernelSpec]:
    """No kernels. Raises KeyError for dtypes that a call does not take."""
    raise KeyError("KroneckerProduct has no kernels of its own: torch computes it")


def candidates(descriptor: KroneckerProduct, *tensors, **arguments) -> Candidates:
    """Raises UnsupportedError: there is nothing to choose from."""
    prepare(descriptor, *tensors, **arguments)
    raise UnsupportedError("a KroneckerProduct is computed by torch, and there is nothing to tune")
