"""The Kronecker-sparse op as operators of ``torch.library``, for whoever records calls and runs
them later and inside transforms of torch.func. Eager calls pass by. Their gradients are those of
eager calls."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch._guards import TracingContext
from torch.compiler import is_exporting

from kernlib.descriptors.base import with_symbols
from kernlib.descriptors.epilogues import Bias
from kernlib.descriptors.text import from_text
from kernlib.families.kronecker_sparse import operation
from kernlib.families.kronecker_sparse.chain import gradient, master_weights
from kernlib.families.kronecker_sparse.chain import operation as chain
from kernlib.families.kronecker_sparse.chain.gradient import keeps_h
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.families.kronecker_sparse.operation import PRODUCT, calls
from kernlib.runtime import products
from kernlib.runtime.arguments import (
    autocast,
    check_names,
    check_parameters,
    check_vector,
    refuse_recorded_out,
    written,
)
from kernlib.runtime.dtypes import FLOAT_TYPES
from kernlib.runtime.operators import is_one_step, register, takes_lists
from kernlib.runtime.schema import PARAMETERS, Schema, all_placed
from kernlib.runtime.tensors import check_dense


def fitted(text: str, weight: torch.Tensor, exact: bool = False) -> KroneckerSparse:
    """The descriptor of a text or, of a form, with the pattern that the weight has, whose sizes may
    be symbols unless they are ``exact``."""
    pattern = from_text(text)
    if text != pattern.form:
        return pattern
    if weight.dim() != 4:
        raise ValueError(f"weight must have shape (a, b, c, d), got {tuple(weight.shape)}")
    if exact:
        return _of_pattern(text, tuple(weight.shape))
    return with_symbols(pattern, **dict(zip("abcd", weight.shape, strict=True)))


@lru_cache(maxsize=1024)
def _of_pattern(text: str, pattern: tuple[int, int, int, int]) -> KroneckerSparse:
    return from_text(text).replace(**dict(zip("abcd", pattern, strict=True)))


def recorded(
    descriptor: KroneckerSparse, operands: tuple, parameters: dict, debug: bool = False
) -> torch.Tensor:
    """A checked call whose gradient is recorded: the product with the leading bias by its operator,
    the other epilogues by torch's own on the rounded result."""
    parts = operation.parts(descriptor)
    bias = parts.operands(parameters).get("bias")
    y = product(*operands, bias, descriptor.batch_last, descriptor.precision, debug)
    return parts.finish(y, parameters)


def _compute(x, weight, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    return calls.execute(fitted(text, weight, exact=True), (x, weight), None, parameters)


def _recorded(x, weight, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    return recorded(from_text(text), (x, weight), parameters, debug)


def _by_torch(x, weight, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    operands = x, weight
    return products.by_reference(PRODUCT, fitted(text, weight), operands, None, parameters)


def _fake(x, weight, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    descriptor = fitted(text, weight)
    return x.new_empty(
        operation.check_operands(descriptor.pattern, descriptor.batch_last, x, weight)
    )


def _fake_product(x, weight, bias, batch_last, precision, debug):
    if weight.dim() != 4:
        raise ValueError(f"weight must have shape (a, b, c, d), got {tuple(weight.shape)}")
    shape = operation.check_operands(weight.shape, batch_last, x, weight)
    if bias is not None:
        check_vector(shape[0 if batch_last else -1], "bias", bias, x, FLOAT_TYPES)
    return x.new_empty(shape)


def _fake_weight_gradient(grad, x, pattern, batch_last, precision, debug):
    operation.check_gradient(grad, x, tuple(pattern), batch_last)
    return x.new_empty(tuple(pattern))


def _backward(saved, grad) -> dict:
    needs = saved.needs.x, saved.needs.weight, saved.needs.bias
    options, ways = _options(saved), (product, weight_gradient)
    if all(needs[:2]) and is_one_step(grad):
        needs = [True, True, bool(needs[2])]
        grads = chain_gradients(grad, [saved.x], [saved.weight], needs, *options)
        to_x, to_weight, to_bias = (*grads, None)[:3]
    else:
        tensors = saved.x, saved.weight, saved.shapes.weight
        grads = operation.product_gradients(grad, *tensors, needs, options, *ways)
        to_x, to_weight, to_bias = grads
    return {"x": to_x, "weight": to_weight, "bias": to_bias}


def _weight_gradient_backward(saved, to_weight) -> dict:
    needs, options = (saved.needs.grad, saved.needs.x), _options(saved)
    grads = operation.weight_gradient_gradients(
        to_weight, saved.grad, saved.x, needs, options, product
    )
    return dict(zip(("grad", "x"), grads, strict=True))


def _options(saved) -> tuple:
    return saved.batch_last, saved.precision, saved.debug


# A chain: one operator, and one each way if its gradient is recorded, however many factors there
# are.


def _compute_whole_chain(x, weights, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    patterns = tuple(tuple(weight.shape) for weight in weights)
    descriptor = _of_patterns(text, patterns)
    if weights[0].dtype is x.dtype:
        return chain.run(descriptor, x, *weights, **parameters)
    return _run_masters(descriptor, x, weights, parameters)


def _run_masters(descriptor: KroneckerSparseChain, x, weights, parameters: dict) -> torch.Tensor:
    weights = (weight.contiguous() for weight in weights)  # as they were in the trace
    return chain.of_masters(descriptor, (x, *weights), parameters)


@lru_cache(maxsize=1024)
def _of_patterns(text: str, patterns: tuple) -> KroneckerSparseChain:
    """The chain of a text or, of a form, with these patterns."""
    factors = zip(from_text(text).factors, patterns, strict=True)
    return KroneckerSparseChain(
        tuple(f if f.text != f.form else _of_pattern(f.text, pattern) for f, pattern in factors)
    )


def _fake_whole_chain(x, weights, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    first, *_ = from_text(text).factors
    return _fake_chain(x, weights, None, first.batch_last, None, debug)[-1]


def _recorded_whole_chain(x, weights, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    descriptor = from_text(text)
    if chain.options_of(descriptor) is None:
        return _by_factor(descriptor, x, weights, parameters, debug)
    last = fitted(descriptor.factors[-1].text, weights[-1])
    parts, options = operation.parts(last), (*chain.options_of(descriptor)[:2], debug)
    y = chain_product(x, weights, parts.operands(parameters).get("bias"), *options)[-1]
    return parts.finish(y, parameters)


def _whole_chain_by_torch(x, weights, text: str, parameters: dict, debug: bool) -> torch.Tensor:
    (x, *weights), parameters = master_weights.rounded((x, *weights), parameters)
    for factor, weight in zip(from_text(text).factors, weights, strict=True):
        values = {name: parameters[name] for name in factor.parameters}
        x = _by_torch(x, weight, factor.text, values, debug)
    return x


def _compute_chain(x, weights, bias, *options) -> list[torch.Tensor]:
    if x.dtype is torch.float32 or keeps_h(x, len(weights), options[0]):
        return chain.results_by_plans(x, weights, bias, options)
    patterns = tuple(tuple(weight.shape) for weight in weights)
    linear = _linear_chain(patterns, bias is not None)
    values = {} if bias is None else {"bias": bias}
    if weights[0].dtype is x.dtype:
        return [chain.run(linear, x, *weights, **values)]
    return [_run_masters(linear, x, weights, values)]


@lru_cache(maxsize=1024)
def _linear_chain(patterns: tuple, bias: bool) -> KroneckerSparseChain:
    """The product, batch first, with or without a bias."""
    *before, last = (KroneckerSparse(*pattern) for pattern in patterns)
    return KroneckerSparseChain((*before, last.replace(epilogue=(Bias(),) if bias else ())))


def _fake_chain(x, weights, bias, *options) -> list[torch.Tensor]:
    (_, *weights), values = master_weights.stand_ins((x, *weights), {"bias": bias})
    results = chain.results(x, weights, values["bias"], options, _fake_product)
    return results if keeps_h(x, len(weights), options[0]) else results[-1:]


def _chain_backward(saved, grads: list) -> dict:
    *inner, grad = grads
    hidden, weights, options = [saved.x, *saved.outputs], saved.weights, _options(saved)
    if grad is None:
        grad = torch.zeros_like(_fake_chain(saved.x, weights, None, *options)[-1])
    needs = saved.needs.x, *saved.needs.weights, bool(saved.needs.bias)
    # A weight that needs no gradient does not need its h either.
    one_step = all(saved.needs.weights) and is_one_step(grad)
    if one_step and all(t is None for t in inner):
        some = iter(chain_gradients(grad, hidden, weights, [*needs], *options))
        grads = [next(some) if need else None for need in needs]
    else:
        request = grad, hidden, weights, needs, options, product, weight_gradient
        grads = gradient.gradients(*request, inner)
    to_x, *to_weights, to_bias = grads
    return {"x": to_x, "weights": to_weights, "bias": to_bias}


def _compute_chain_gradients(grad, hidden, weights, needs, *options) -> list[torch.Tensor]:
    if 0 in grad.stride():  # sum()'s: kernels that copy tiles cannot read its strides
        grad = grad.contiguous()
    grads = gradient.by_plans(grad, hidden, weights, tuple(needs), options)
    return [t.contiguous() for t in grads if t is not None]


def _fake_chain_gradients(grad, hidden, weights, needs, *options) -> list[torch.Tensor]:
    features = grad.shape[:1] if options[0] else grad.shape[-1:]
    results = [grad.new_empty(hidden[0].shape)] if needs[0] else []
    shapes = zip((*(weight.shape for weight in weights), features), needs[1:], strict=True)
    return results + [weights[0].new_empty(shape) for shape, need in shapes if need]


def _recorded_chain_gradients(grad, hidden, weights, needs, *options) -> list[torch.Tensor]:
    request = grad, hidden, weights, tuple(needs), options, product, weight_gradient
    return [t for t in gradient.gradients(*request) if t is not None]


_OPTIONS = "bool batch_last", "str? precision", "bool debug"
whole = register(
    "kronecker_sparse",
    Schema("Tensor x", "Tensor weight", "str descriptor", PARAMETERS, "bool debug"),
    "Tensor",
    _compute,
    _fake,
    recorded=_recorded,
    forward=_by_torch,
)
product = register(
    "kronecker_sparse_product",
    Schema("Tensor x", "Tensor weight", "Tensor? bias", *_OPTIONS),
    "Tensor",
    operation.product,
    _fake_product,
    saves={"x": ("weight",), "weight": ("x",)},
    backward=_backward,
)
weight_gradient = register(
    "kronecker_sparse_weight_gradient",
    Schema("Tensor grad", "Tensor x", "SymInt[] pattern", *_OPTIONS),
    "Tensor",
    operation.weight_gradient,
    _fake_weight_gradient,
    saves={"grad": ("x",), "x": ("grad",)},
    backward=_weight_gradient_backward,
)
whole_chain = register(
    "kronecker_sparse_chain",
    Schema("Tensor x", "Tensor[] weights", "str descriptor", PARAMETERS, "bool debug"),
    "Tensor",
    _compute_whole_chain,
    _fake_whole_chain,
    recorded=_recorded_whole_chain,
    forward=_whole_chain_by_torch,
)
chain_product = register(
    "kronecker_sparse_chain_product",
    Schema("Tensor x", "Tensor[] weights", "Tensor? bias", *_OPTIONS),
    "Tensor[]",
    _compute_chain,
    _fake_chain,
    saves=("x", "weights"),
    outputs=-1,
    materialize=False,
    backward=_chain_backward,
)
chain_gradients = register(
    "kronecker_sparse_chain_gradients",
    Schema("Tensor grad", "Tensor[] hidden", "Tensor[] weights", "bool[] needs", *_OPTIONS),
    "Tensor[]",
    _compute_chain_gradients,
    _fake_chain_gradients,
    recorded=_recorded_chain_gradients,
    batched=_recorded_chain_gradients,
)


# What Dynamo traces.


def run(
    descriptor: KroneckerSparse | KroneckerSparseChain,
    *operands: torch.Tensor,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **parameters,
) -> torch.Tensor:
    """:func:`kernlib.run_kernel` by way of the operators.

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
    check_names(descriptor, parameters)
    operation.check_kinds(descriptor, operands)
    if len(operands) > 2 and _is_compiled() and takes_lists(*tensors):
        return _chain(text, operands, parameters, debug)
    return _by_factor(descriptor, operands[0], operands[1:], parameters, debug)


def run_fitted(
    descriptor: KroneckerSparse | KroneckerSparseChain, *operands: torch.Tensor, **parameters
) -> torch.Tensor:
    """:func:`run` of a descriptor for weights whose shapes are its patterns: one program holds for
    layers of other patterns."""
    names = " ".join(parameters)
    return _traced(descriptor.form, names, False, *operands, *parameters.values())


def _is_compiled() -> bool:
    """Whether the call is traced for a program that is not saved, checked or differentiated again:
    in a graph of make_fx torch detaches the results that a backward pass reads."""
    return TracingContext.try_get() is not None and not is_exporting() and not _is_tracing()


def _chain(text: str, operands: tuple, parameters: dict, debug: bool) -> torch.Tensor:
    """A checked chain by its operator."""
    descriptor = from_text(text)
    check_dense(tuple(descriptor.operands), **dict(zip(descriptor.operands, operands, strict=True)))
    masters = False
    if torch.is_grad_enabled() and all(weight.requires_grad for weight in operands[1:]):
        operands, parameters, masters = master_weights.autocast(descriptor, operands, parameters)
    else:  # by kernels of the program around it, which may round frozen weights once
        operands, parameters = autocast(operands, parameters)
    (x, *weights), shown = operands, (operands, parameters)
    if masters:
        shown = master_weights.stand_ins(operands, parameters)
    h = x
    for factor, weight in zip(descriptor.factors, shown[0][1:], strict=True):
        factor = fitted(factor.text, weight)
        h = h.new_empty(operation.check_operands(factor.pattern, factor.batch_last, h, weight))
        values = {name: shown[1][name] for name in factor.parameters}
        check_parameters(factor, factor.out_features, values, x, False, FLOAT_TYPES, h.shape)
    return whole_chain(x, weights, text, all_placed(parameters, x.device), debug)


def _by_factor(descriptor, x, weights, parameters: dict, debug: bool) -> torch.Tensor:
    for factor, weight in zip(descriptor.factors, weights, strict=True):
        values = {name: parameters[name] for name in factor.parameters}
        x = _factor(factor, x, weight, values, debug)
    return x


def _factor(descriptor: KroneckerSparse, x, weight, parameters: dict, debug: bool) -> torch.Tensor:
    text = descriptor.text
    descriptor = fitted(text, weight)
    check_dense(("x", "weight"), x=x, weight=weight)
    (x, weight), parameters = autocast((x, weight), parameters)
    operation.check_operands(descriptor.pattern, descriptor.batch_last, x, weight)
    check_parameters(descriptor, descriptor.out_features, parameters, x, False, FLOAT_TYPES)
    if _are_functorch_transforms_active():  # the operators do not follow these
        return products.by_reference(PRODUCT, descriptor, (x, weight), None, parameters)
    return whole(x, weight, text, all_placed(parameters, x.device), debug)


# Requests of tensors that stand for others.


def _call(descriptor: KroneckerSparse, operands: tuple, out, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, **parameters)


def _call_gradient(grad, x, pattern, batch_last: bool, precision: str | None) -> torch.Tensor:
    return weight_gradient(grad, x, pattern, batch_last, precision, False)


BY_NAME = {
    "kronecker_sparse": _call,
    "kronecker_sparse_chain": _call,
    "kronecker_sparse_weight_gradient": _call_gradient,
}
