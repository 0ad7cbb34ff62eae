"""Products with Kronecker products: checks of a call, the choice between kernels and torch,
gradients, and the call itself.

CPU tensors, factors too large for a kernel's shared memory, and calls inside transforms of
torch.func are computed by the reference.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.lowering import choose
from kernlib.runtime import autograd, devices, operation, products, rehearsal
from kernlib.runtime.arguments import (
    autocast,
    check_broadcast,
    check_names,
    check_out,
    check_parameters,
    check_same_kind,
    parameter_key,
)
from kernlib.runtime.autograd import (
    Parts,
    Recording,
    bias_gradient,
    is_biased,
    is_watched,
    recorder,
)
from kernlib.runtime.devices import arch_of
from kernlib.runtime.dtypes import DTYPE_NAMES, FLOAT_TYPES
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation
from kernlib.runtime.precision import float32_precision, kernel_precision
from kernlib.runtime.products import Call, front_door
from kernlib.runtime.tensors import (
    UNREADABLE,
    broadcast_shapes,
    check_dense,
    check_memory,
    check_out_shape,
    is_lazy,
    is_wrapped,
    materialised,
    signature,
)

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

_OPERATORS = "kernlib.families.kronecker_product.operators"


# Checks.


def names(operands: tuple) -> tuple[str, ...]:
    """The operands' names in errors."""
    return "x", *(f"factors[{index}]" for index in range(len(operands) - 1))


def check_kinds(descriptor: KroneckerProduct, operands: tuple) -> None:
    """An x and one factor for each shape, all of them dense tensors. Raises TypeError."""
    count = len(descriptor.shapes)
    if len(operands) != 1 + count:
        expected = "one factor" if count == 1 else f"{count} factors in their order"
        count_text = f"got {len(operands) - 1}" if operands else "got neither"
        raise TypeError(f"{descriptor.describe()} takes x and {expected}, {count_text}")
    by_name = dict(zip(names(operands), operands, strict=True))
    check_dense(tuple(by_name), **by_name)


def check_call(descriptor: KroneckerProduct, operands: tuple, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    x = operands[0]
    shape = check_operands(descriptor, operands)
    check_parameters(descriptor, descriptor.out_features, parameters, x, True, FLOAT_TYPES, shape)
    if out is not None:
        check_dense((), out=out)
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape) // descriptor.out_features, shape, x.dtype, x.device)


def check_operands(descriptor: KroneckerProduct, operands: tuple) -> tuple[int, ...]:
    """The output's shape, for an x with two dimensions or more. Sizes may be symbols. Raises
    ValueError and TypeError."""
    x, *factors = operands
    axis, features = descriptor.axis, descriptor.in_features
    if x.dim() < 2 or x.shape[axis] != features:
        expected = f"(..., {features})" if axis == -1 else f"({features},) or (..., {features}, M)"
        raise ValueError(
            f"x must be {expected} for {descriptor.describe()}, got shape {tuple(x.shape)}"
        )
    batches = [x.shape[:-2]]
    pairs = zip(factors, descriptor.factor_shapes, strict=True)
    for index, (factor, expected) in enumerate(pairs):
        name = f"factors[{index}]"
        check_same_kind("x", x, name, factor, FLOAT_TYPES)
        if factor.dim() < 2 or tuple(factor.shape[-2:]) != expected:
            raise ValueError(
                f"{name} must have shape {expected}, or a batch of it, got {tuple(factor.shape)}"
            )
        batches.append(factor.shape[:-2])
    batch = _broadcast(batches, names(operands))
    rows = x.shape[-3 - axis]  # the other of the last two
    ends = (rows, descriptor.out_features) if axis == -1 else (descriptor.out_features, rows)
    return (*batch, *ends)


def _broadcast(batches: list, names: tuple[str, ...]) -> tuple[int, ...]:
    try:
        return broadcast_shapes(*batches)
    except RuntimeError:
        named = zip(names, batches, strict=True)
        shown = ", ".join(f"{name} {tuple(batch)}" for name, batch in named if len(batch))
        raise ValueError(
            "dimensions in front of the last two must broadcast, those of x and of each factor, "
            f"got {shown}"
        ) from None


def as_matrix(
    descriptor: KroneckerProduct, operands: tuple, out, parameters: dict
) -> tuple[tuple, torch.Tensor | None, dict]:
    """Operands with a vector x as one row or column, ``out`` as a matrix of the same kind, and the
    parameters for that. Raises what :func:`check_call` raises."""
    check_kinds(descriptor, operands)
    other = -3 - descriptor.axis  # the dimension that the vector lacks
    operands = operands[0].unsqueeze(other), *operands[1:]
    parameters = dict(parameters)
    for name in descriptor.summands:
        value = parameters.get(name)
        if isinstance(value, torch.Tensor) and value.dim():
            check_broadcast((descriptor.out_features,), name, value)
            parameters[name] = value.unsqueeze(other)
    if out is None:
        return operands, None, parameters
    check_dense((), out=out)
    shape = list(check_operands(descriptor, operands))
    del shape[other]
    check_out_shape(out, tuple(shape))
    return operands, out.unsqueeze(other), parameters


# The product, without autocast and without a record of gradients.


def _key(descriptor: KroneckerProduct, operands: tuple, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor; the precision of torch's own products, by which a
    plan may compute whatever the descriptor permits; then shapes, strides, dtypes, device,
    alignment and kinds of numbers. None where there can be no plan."""
    try:
        key = (descriptor.text, float32_precision())
        for operand in operands:
            key += signature(operand)
        if out is not None:
            key += (signature(out),)  # as one entry, lest it pass for an operand too many
        for name, value in parameters.items():
            key += (name, parameter_key(value))
    except UNREADABLE:
        check_kinds(descriptor, operands)
        check_dense((), out=out)
        return None
    return key


def _way(call: Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    """How a call is computed: by kernels where they take it on CUDA; by torch all else, and inside
    a transform of torch.func. Raises UnsupportedError for devices that have no backend."""
    if not products.is_on_gpu(call.device):
        return REFERENCE
    if any(map(is_wrapped, (*operands, out, *parameters.values()))):
        return REFERENCE
    return KERNELS if plans.takes(call, descriptor, operands) else REFERENCE


def _reference(descriptor: KroneckerProduct, operands: tuple, parameters: dict) -> torch.Tensor:
    from kernlib.families.kronecker_product.reference import kronecker_product

    x, *factors = operands
    return kronecker_product(descriptor, x, tuple(factors), parameters)


PRODUCT = products.Product(
    name="kronecker_product",
    operators=_OPERATORS,
    key=_key,
    check=check_call,
    way=_way,
    plan=plans.plan,
    reference=_reference,
    tensors=tuple,
    names=names,
    check_operands=check_kinds,
    cast=autocast,
)
calls = products.bind(PRODUCT)


# Gradients, without a record. The one by x is a product with the transposed factors, by the same
# kernels. Where gradients by factors are asked for, other kernels compute these and the one by x.
# They compute what they need from x again: nothing but x and the factors is kept between forward
# and backward. Torch computes gradients by factors that kernels do not hold.


@lru_cache(maxsize=1024)
def adjoint(descriptor: KroneckerProduct) -> KroneckerProduct:
    """The product that turns a result's gradient into that of x, with the same factors."""
    return descriptor.replace(
        shapes=tuple(shape[::-1] for shape in descriptor.shapes),
        transposed=tuple(not turned for turned in descriptor.transposed),
        epilogue=(),
    )


def apart(descriptor: KroneckerProduct, grad: torch.Tensor, operands: tuple, needs: tuple) -> list:
    """The gradients that are needed, None for others: the one by x by the product that it is, those
    by factors by torch."""
    gradients = by_torch(descriptor, grad, operands, [False, *needs[1:]])
    if needs[0]:
        x, *factors = operands
        to_x = calls.execute(adjoint(descriptor), (grad, *factors), None, {})
        gradients[0] = to_x.sum_to_size(x.shape)
    return gradients


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality  # excluded inside of operators


def by_torch(descriptor: KroneckerProduct, grad, operands: tuple, needs: list) -> list:
    """The gradients by x and by the factors, by torch's own operators and, where gradients are
    recorded, with a record; None for those that are not needed."""
    if not any(needs):
        return [None] * len(needs)
    descriptor = _plain(descriptor)
    recorded = torch.is_grad_enabled()
    pairs = list(zip(operands, needs, strict=True))
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False):
        if recorded:  # by aliases, as two of the arguments may be the same tensor
            leaves = [t.view_as(t) if need else t for t, need in pairs]
        else:
            leaves = [t.detach().requires_grad_(need) for t, need in pairs]
        y = products.by_reference(PRODUCT, descriptor, tuple(leaves), None, {})
        inputs = [t for t, need in zip(leaves, needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(y, inputs, grad, create_graph=recorded))
    return [next(gradients) if need else None for need in needs]


def _gradient_key(descriptor: KroneckerProduct, grad, operands: tuple, needs: tuple):
    try:
        permitted = float32_precision() if descriptor.precision is None else None
        return descriptor.text, permitted, needs, *map(signature, (grad, *operands))
    except (AttributeError, RuntimeError, NotImplementedError):  # tensors without memory
        return None


def _gradient_way(call: Call, descriptor, grad, operands: tuple, needs: tuple) -> str:
    """How the gradients are computed: by kernels where they take them on CUDA."""
    if is_wrapped(grad) or _way(call, descriptor, operands, None, {}) == REFERENCE:
        return REFERENCE
    arch = arch_of(operands[0].get_device())
    takes = call.batch and plans.takes_gradients(descriptor, call.dtype, arch)
    return KERNELS if takes else REFERENCE


def has_kernels(descriptor: KroneckerProduct, operands: tuple) -> bool:
    """Whether kernels compute all gradients of a call that torch records; which are needed is not
    known yet."""
    descriptor = _plain(descriptor)
    call = check_call(descriptor, operands, None, {})
    return _gradient_way(call, descriptor, operands[0], operands, ()) == KERNELS


def _launch_gradients(
    plan: plans.GradientPlan, descriptor, grad, operands: tuple, needs: tuple
) -> list:
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _launch_gradients(plan, descriptor, grad, operands, needs)
    addresses, copies = plan.place((grad, *operands))
    gradients = [None if new is None else new() for new in plan.results]
    addresses += [t.data_ptr() for t in gradients if t is not None]
    plan.launch(addresses)
    del copies  # their memory is reused on the same stream, so behind the launch
    if plan.shapes is None:
        return gradients
    return [
        t if shape is None or t is None else t.sum_to_size(shape)
        for t, shape in zip(gradients, plan.shapes, strict=True)
    ]


def _materialised(descriptor, grad, operands: tuple, needs: tuple) -> tuple | None:
    if not any(map(is_lazy, (grad, *operands))):
        return None
    return descriptor, materialised(grad), tuple(map(materialised, operands)), needs


GRADIENTS = Operation(  # by x and all factors at once
    name="kronecker_product_gradients",
    operators=_OPERATORS,
    key=_gradient_key,
    check=lambda descriptor, grad, operands, needs: check_call(descriptor, operands, None, {}),
    way=_gradient_way,
    reference=lambda call, *request: apart(*request),
    plan=plans.gradient_plan,
    launch=_launch_gradients,
    tensors=lambda descriptor, grad, operands, needs: (grad, *operands),
    materialised=_materialised,
    rehearsed=lambda plan, *request: [rehearsal.like(t) for t in request[2]],
)
_all_gradients = operation.bind(GRADIENTS)


# Eager calls that record gradients. Torch computes gradients of gradients.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, plan, bias, *operands):
        ctx.descriptor = descriptor
        ctx.save_for_backward(*operands)
        request = descriptor, operands, None, {} if bias is None else {"bias": bias}
        return calls.execute(*request) if plan is None else calls.launch(plan, *request)

    @staticmethod
    def backward(ctx, grad):
        _, _, of_bias, *needs = ctx.needs_input_grad
        if 0 in grad.stride():  # sum()'s: kernels that copy tiles cannot read its strides
            grad = grad.contiguous()
        to_bias = bias_gradient(grad, ctx.descriptor.axis) if of_bias else None
        gradients = by_torch if is_watched(grad) or torch.is_grad_enabled() else by_kernels
        return None, None, to_bias, *gradients(ctx.descriptor, grad, ctx.saved_tensors, needs)


@lru_cache(maxsize=1024)
def _plain(descriptor: KroneckerProduct) -> KroneckerProduct:
    return descriptor.replace(epilogue=())


def by_kernels(descriptor: KroneckerProduct, grad: torch.Tensor, operands: tuple, needs: list):
    """The gradients by x and by the factors, without a record; None for those that are not
    needed."""
    descriptor = _plain(descriptor)
    if not any(needs[1:]):
        return apart(descriptor, grad, operands, tuple(needs))
    gradients = _all_gradients.execute(descriptor, grad, operands, tuple(needs))
    if all(needs):
        return gradients
    return [t if need else None for t, need in zip(gradients, needs, strict=True)]


@lru_cache(maxsize=1024)
def parts(descriptor: KroneckerProduct) -> Parts:
    """The parts of a call whose gradient is recorded."""
    linear = descriptor.replace(epilogue=(Bias(),) if is_biased(descriptor) else ())
    return autograd.parts(descriptor, linear, descriptor.axis)


def _apply(descriptor: KroneckerProduct, operands: tuple, bias, plan) -> torch.Tensor:
    return _Product.apply(descriptor, plan, bias, *operands)


# The call as it is made.


_run_matrix = front_door(PRODUCT, calls, recorder(PRODUCT, calls, Recording(parts, _apply)))


def run(descriptor: KroneckerProduct, *operands, out=None, **parameters) -> torch.Tensor:
    """A call of :func:`kernlib.run_kernel`. An x of one dimension counts as one row, or column."""
    try:
        is_vector = operands[0].dim() == 1
    except (IndexError, AttributeError, TypeError, ValueError):  # the checks say that it is none
        is_vector = False
    if not is_vector:
        return _run_matrix(descriptor, *operands, out=out, **parameters)
    operands, written, parameters = as_matrix(descriptor, operands, out, parameters)
    y = _run_matrix(descriptor, *operands, out=written, **parameters)
    return y.squeeze(-3 - descriptor.axis) if out is None else out


RUNS = {KroneckerProduct: run}


def planned(descriptor: KroneckerProduct, tensors: tuple, arguments: dict) -> list[Planned]:
    """The parts of a call that have a plan, and of its gradient by x where that is a product."""
    from kernlib.runtime.ahead import planned_product

    rest = dict(arguments)
    out = rest.pop("out", None)
    check_names(descriptor, rest)
    check_kinds(descriptor, tensors)
    if tensors[0].dim() == 1:
        tensors, out, rest = as_matrix(descriptor, tensors, out, rest)
    call = planned_product(PRODUCT, calls, parts, descriptor, tensors, {**rest, "out": out})
    x, *factors = call.request[1]
    if not call.recorded or not x.requires_grad or x.device.type != "cuda":
        return [call]
    checked, arch = PRODUCT.check(*call.request), arch_of(x.get_device())
    if any(t.requires_grad for t in factors) and plans.takes_gradients(
        descriptor, checked.dtype, arch
    ):
        return [call]
    grad = x.new_empty(checked.out_shape, dtype=checked.dtype)
    constant = tuple(factor.detach() for factor in factors)
    return [call, planned_product(PRODUCT, calls, None, adjoint(descriptor), (grad, *constant), {})]


def variants(
    descriptor: KroneckerProduct, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose, untuned, for a descriptor, its gradients included, and
    inputs of ``dtypes``. Raises KeyError for dtypes that a call does not take."""
    from kernlib.families.kronecker_product.lowering import gradients

    dtype_names, precisions = [DTYPE_NAMES[dtype] for dtype in dtypes], ("fp32", "tf32")
    if descriptor.precision is not None:
        precisions = (kernel_precision(descriptor.precision, torch.float32),)
    kinds = [(n, p) for n in dtype_names for p in (precisions if n == "float32" else ("fp32",))]
    inside, specs = descriptor.side == "left", {}
    for product in (descriptor, parts(descriptor).product, adjoint(descriptor)):
        sizes = plans.sizes_of(product)
        specs |= dict.fromkeys(choose.variants(product.epilogue, sizes, inside, kinds, arch))
    sizes = plans.sizes_of(descriptor)
    return list(specs | dict.fromkeys(gradients.variants(sizes, inside, kinds, arch)))
