"""Products with Kronecker products as operators of ``torch.library``, for whoever records calls
and runs them later. Eager calls pass by. A gradient that kernels do not compute, and transforms of
torch.func, are left to torch's own operators."""

from __future__ import annotations

from functools import lru_cache

import torch

from kernlib.descriptors.base import with_symbols
from kernlib.descriptors.text import from_text
from kernlib.families.kronecker_product import operation
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.matmul import check_sizes
from kernlib.families.kronecker_product.operation import PRODUCT, calls
from kernlib.runtime import products
from kernlib.runtime.arguments import (
    autocast,
    check_parameters,
    refuse_recorded_out,
    written,
)
from kernlib.runtime.autograd import bias_gradient
from kernlib.runtime.dtypes import FLOAT_TYPES
from kernlib.runtime.operators import in_front, is_one_step, register, takes_lists
from kernlib.runtime.schema import PARAMETERS, Schema, all_placed, is_mapped


def fitted(text: str, factors, exact: bool = False) -> KroneckerProduct:
    """The descriptor of a text or, of a form, with the shapes that the factors have, whose sizes
    may be symbols unless they are ``exact``."""
    product = from_text(text)
    if text != product.form:
        return product
    shapes = _shapes(product, factors)
    return _of_shapes(text, shapes) if exact else with_symbols(product, shapes=shapes)


@lru_cache(maxsize=1024)
def _of_shapes(text: str, shapes: tuple[tuple[int, int], ...]) -> KroneckerProduct:
    return from_text(text).replace(shapes=shapes)


def _shapes(descriptor: KroneckerProduct, factors) -> tuple[tuple[int, int], ...]:
    """The factors' shapes as they multiply. Raises ValueError."""
    shapes = []
    for index, (factor, turned) in enumerate(zip(factors, descriptor.transposed, strict=True)):
        if factor.dim() < 2:
            name = f"factors[{index}]"
            raise ValueError(f"{name} must be a matrix, got shape {tuple(factor.shape)}")
        rows, columns = factor.shape[-2:]
        shapes.append((columns, rows) if turned else (rows, columns))
    return tuple(shapes)


def recorded(
    descriptor: KroneckerProduct, operands: tuple, parameters: dict, debug: bool = False
) -> torch.Tensor:
    """A checked call whose gradient is recorded, by torch's own operators."""
    return products.by_reference(PRODUCT, descriptor, operands, None, parameters)


def _by_torch(x, factors, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    operands = x, *factors
    return products.by_reference(PRODUCT, fitted(text, factors), operands, None, parameters)


def _recorded(x, factors, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    """The product with the leading bias by its operator, where kernels compute its gradients, and
    the other epilogues by torch's own on the rounded result."""
    shapes = _shapes(from_text(text), factors)
    are_known = all(isinstance(size, int) for shape in shapes for size in shape)  # and no symbols
    if not are_known or not takes_lists(x, *factors, *parameters.values()):
        return _by_torch(x, factors, text, parameters, debug)
    descriptor = fitted(text, factors, exact=True)
    parts = operation.parts(descriptor)
    if not operation.has_kernels(parts.product, (x, *factors)):
        return _by_torch(x, factors, text, parameters, debug)
    y = product_of(x, factors, parts.product.text, parts.operands(parameters).get("bias"), debug)
    return parts.finish(y, parameters)


def _compute_product(x, factors, text: str, bias, debug: bool) -> torch.Tensor:
    return _compute(x, factors, text, {} if bias is None else {"bias": bias}, debug)


def _fake_product(x, factors, text: str, bias, debug: bool) -> torch.Tensor:
    return _fake(x, factors, text, {}, debug)


def _backward(saved, grad) -> dict:
    operands, needs = (saved.x, *saved.factors), [saved.needs.x, *saved.needs.factors]
    descriptor = from_text(saved.descriptor)
    if not is_one_step(grad):
        grads = operation.by_torch(descriptor, grad, operands, needs)
    elif any(saved.needs.factors):
        request = grad, saved.x, saved.factors, saved.descriptor, needs, saved.debug
        some = iter(gradients(*request))
        grads = [next(some) if need else None for need in needs]
    else:
        grads = [None] * len(needs)
        if saved.needs.x:  # by what does not read x
            text = operation.adjoint(descriptor).text
            to_x = whole(grad, saved.factors, text, {}, saved.debug)
            grads[0] = to_x.sum_to_size(saved.shapes.x)
    to_bias = bias_gradient(grad, descriptor.axis) if saved.needs.bias else None
    return {"x": grads[0], "factors": grads[1:], "bias": to_bias}


def _compute_gradients(grad, x, factors, text: str, needs, debug: bool) -> list[torch.Tensor]:
    if 0 in grad.stride():  # sum()'s: kernels that copy tiles cannot read its strides
        grad = grad.contiguous()
    grads = operation.by_kernels(from_text(text), grad, (x, *factors), needs)
    return [t.contiguous() for t in grads if t is not None]


def _fake_gradients(grad, x, factors, text: str, needs, debug: bool) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t, need in zip((x, *factors), needs, strict=True) if need]


def _recorded_gradients(grad, x, factors, text: str, needs, debug: bool) -> list[torch.Tensor]:
    grads = operation.by_torch(from_text(text), grad, (x, *factors), needs)
    return [t.contiguous() for t in grads if t is not None]


def _compute(x, factors, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    return calls.execute(fitted(text, factors, exact=True), (x, *factors), None, parameters)


def _fake(x, factors, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    return x.new_empty(operation.check_operands(fitted(text, factors), (x, *factors)))


def _mapped(info, dims, x, factors, text: str, parameters: dict, debug: bool):
    """Over a batch in front of all others."""
    if is_mapped(dims.tensors):
        raise NotImplementedError(
            f"torch.vmap over parameters of {text} is not known; apply them to the product"
        )
    operands = [(x, dims.x), *zip(factors, dims.factors, strict=True)]
    rank = max(t.dim() - (dim is not None) for t, dim in operands)
    x, *factors = (in_front(t, dim, rank) for t, dim in operands)
    return whole(x, factors, text, parameters, debug), 0


whole = register(
    "kronecker_product",
    Schema("Tensor x", "Tensor[] factors", "str descriptor", PARAMETERS, "bool debug"),
    "Tensor",
    _compute,
    _fake,
    recorded=_recorded,
    forward=_by_torch,
    vmap=_mapped,
)
# Of factors whose shapes its descriptor has.
product_of = register(
    "kronecker_product_of",
    Schema("Tensor x", "Tensor[] factors", "str descriptor", "Tensor? bias", "bool debug"),
    "Tensor",
    _compute_product,
    _fake_product,
    saves=("x", "factors"),
    backward=_backward,
)
gradients = register(
    "kronecker_product_gradients",
    Schema(
        "Tensor grad",
        "Tensor x",
        "Tensor[] factors",
        "str descriptor",
        "bool[] needs",
        "bool debug",
    ),
    "Tensor[]",
    _compute_gradients,
    _fake_gradients,
    recorded=_recorded_gradients,
    batched=_recorded_gradients,
)


# What Dynamo traces.


def run(
    descriptor: KroneckerProduct,
    *operands: torch.Tensor,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **parameters,
) -> torch.Tensor:
    """:func:`kernlib.run_kernel` by way of the operator.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values when the
    operator runs.
    """
    refuse_recorded_out(out, *operands, *parameters.values())
    names = " ".join(parameters)
    y = _traced(descriptor.text, names, debug, *operands, *parameters.values())
    return written(out, y, operands[0])


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does: descriptors
# field by field would make symbols of their sizes, and it could not read the text.
@torch.compiler.allow_in_graph
def _traced(text: str, names: str, debug: bool, *tensors) -> torch.Tensor:
    descriptor, listed = from_text(text), names.split()
    operands = tensors[: len(tensors) - len(listed)]
    parameters = dict(zip(listed, tensors[len(operands) :], strict=True))
    operation.check_kinds(descriptor, operands)
    descriptor = fitted(text, operands[1:])
    vector = operands[0].dim() == 1
    if vector:
        operands, _, parameters = operation.as_matrix(descriptor, operands, None, parameters)
    operands, parameters = autocast(operands, parameters)
    shape, features = operation.check_operands(descriptor, operands), descriptor.out_features
    check_parameters(descriptor, features, parameters, operands[0], False, FLOAT_TYPES, shape)
    x, *factors = operands
    y = whole(x, factors, text, all_placed(parameters, x.device), debug)
    return y.squeeze(-3 - descriptor.axis) if vector else y


@torch.compiler.allow_in_graph
def product(
    side: str, precision: str | None, debug: bool, x: torch.Tensor, *factors
) -> torch.Tensor:
    """A product with factors whose sizes say which."""
    check_sizes(factors)
    descriptor = KroneckerProduct((1,) * len(factors), side=side, precision=precision)
    return _traced(descriptor.form, "", debug, x, *factors)


def run_fitted(descriptor: KroneckerProduct, x, *factors, **parameters) -> torch.Tensor:
    """:func:`run` of a descriptor for factors whose shapes are its: a program of one layer is that
    of layers of others."""
    operands = *factors, *parameters.values()
    return _traced(descriptor.form, " ".join(parameters), False, x, *operands)


def _call(descriptor: KroneckerProduct, operands: tuple, out, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, **parameters)


# Requests of tensors that stand for others.
BY_NAME = {"kronecker_product": _call, operation.GRADIENTS.name: operation.apart}
