"""Products with Kronecker products, as they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernlib.families.kronecker_product import checks, plans
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.product import PRODUCT, calls
from kernlib.runtime.arguments import check_names
from kernlib.runtime.devices import arch_of
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.products import front_door

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned


def _recorded(*request) -> torch.Tensor:
    from kernlib.families.kronecker_product import gradients  # which other calls do without

    return gradients.recorded(*request)


_run_matrix = front_door(PRODUCT, calls, _recorded)


def run(descriptor: KroneckerProduct, *operands, out=None, **parameters) -> torch.Tensor:
    """A call of :func:`kernlib.run_kernel`. An x of one dimension counts as one row, or column."""
    try:
        is_vector = operands[0].dim() == 1
    except (IndexError, AttributeError, TypeError, ValueError):  # the checks say that it is none
        is_vector = False
    if not is_vector:
        return _run_matrix(descriptor, *operands, out=out, **parameters)
    operands, written, parameters = checks.as_matrix(descriptor, operands, out, parameters)
    y = _run_matrix(descriptor, *operands, out=written, **parameters)
    return y.squeeze(-3 - descriptor.axis) if out is None else out


RUNS = {KroneckerProduct: run}


# Calls before anybody makes them.


def planned(descriptor: KroneckerProduct, tensors: tuple, arguments: dict) -> list[Planned]:
    """What of a call has a plan, and of its gradient by x where that is a product."""
    from kernlib.families.kronecker_product import backward
    from kernlib.families.kronecker_product.gradients import adjoint, parts
    from kernlib.runtime.ahead import planned_product

    rest = dict(arguments)
    out = rest.pop("out", None)
    check_names(descriptor, rest)
    checks.check_kinds(descriptor, tensors)
    if tensors[0].dim() == 1:
        tensors, out, rest = checks.as_matrix(descriptor, tensors, out, rest)
    call = planned_product(PRODUCT, calls, parts, descriptor, tensors, {**rest, "out": out})
    x, *factors = call.request[1]
    if not call.recorded or not x.requires_grad or x.device.type != "cuda":
        return [call]
    checked, arch = PRODUCT.check(*call.request), arch_of(x.get_device())
    if any(t.requires_grad for t in factors) and backward.takes(descriptor, checked.dtype, arch):
        return [call]
    grad = x.new_empty(checked.out_shape, dtype=checked.dtype)
    constant = tuple(factor.detach() for factor in factors)
    return [call, planned_product(PRODUCT, calls, None, adjoint(descriptor), (grad, *constant), {})]


def variants(
    descriptor: KroneckerProduct, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose, untuned, for a descriptor, its gradients included, and
    inputs of ``dtypes``. Raises KeyError for dtypes that a call does not take."""
    from kernlib.families.kronecker_product.gradients import adjoint, parts
    from kernlib.families.kronecker_product.lowering import choose, gradients

    names, precisions = [DTYPE_NAMES[dtype] for dtype in dtypes], ("fp32", "tf32")
    if descriptor.precision is not None:
        precisions = (plans.kernel_precision(descriptor.precision, torch.float32),)
    kinds = [(n, p) for n in names for p in (precisions if n == "float32" else ("fp32",))]
    inside, specs = descriptor.side == "left", {}
    for each in (descriptor, parts(descriptor).product, adjoint(descriptor)):
        sizes = tuple(shape[::-1] if inside else shape for shape in each.shapes)
        specs |= dict.fromkeys(choose.variants(each.epilogue, sizes, inside, kinds, arch))
    sizes = tuple(shape[::-1] if inside else shape for shape in descriptor.shapes)
    return list(specs | dict.fromkeys(gradients.variants(sizes, inside, kinds, arch)))
