"""The Kronecker-sparse op as operators of ``torch.library``, and its gradient, of which there is
this one definition for eager and for compiled calls.

The product ``y = K(weight) x``, its gradient with respect to x, which is a product again, and that
with respect to the weight are trilinear in (grad, x, weight): the gradient of each is the other
two, to any order.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch

from kernlib import events
from kernlib.descriptors.epilogues import Bias
from kernlib.descriptors.kronecker_sparse import KroneckerSparse
from kernlib.descriptors.text import from_text
from kernlib.ops import kronecker_sparse as op
from kernlib.ops import kronecker_sparse_checks as checks
from kernlib.ops.hyperparameters import accumulator
from kernlib.reference import kronecker_sparse as reference

_library = torch.library.Library("kernlib", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
# ``names`` are those of ``numbers``, then those of ``tensors``; one text with spaces, for
# torch.jit.trace takes no list of str.
_library.define(
    "kronecker_sparse(Tensor x, Tensor weight, str descriptor, str names, float[] numbers, "
    "Tensor[] tensors, bool debug) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "kronecker_sparse_product(Tensor x, Tensor weight, Tensor? bias, bool batch_last, "
    "str? precision, bool debug) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "kronecker_sparse_weight_gradient(Tensor grad, Tensor x, SymInt[] pattern, bool batch_last, "
    "str? precision, bool debug) -> Tensor",
    tags=_TAGS,
)
whole = torch.ops.kernlib.kronecker_sparse.default
product = torch.ops.kernlib.kronecker_sparse_product.default
weight_gradient = torch.ops.kernlib.kronecker_sparse_weight_gradient.default


def leading_bias(descriptor: KroneckerSparse) -> str | None:
    """The parameter of the Bias that the epilogues begin with, if they do."""
    first = descriptor.epilogue[0] if descriptor.epilogue else None
    return first.parameter if isinstance(first, Bias) else None


@lru_cache(maxsize=1024)
def linear(pattern: tuple, batch_last: bool, precision: str | None, bias: bool) -> KroneckerSparse:
    """The product with one factor, with or without a bias."""
    epilogue = (Bias(),) if bias else ()
    return KroneckerSparse(*pattern, batch_last=batch_last, epilogue=epilogue, precision=precision)


def recorded(
    descriptor: KroneckerSparse, x, weight, parameters: dict, debug: bool = False
) -> torch.Tensor:
    """A checked call whose gradient is recorded: the product with the leading bias by its operator,
    the other epilogues by torch's own on the rounded result."""
    name = leading_bias(descriptor)
    bias = None if name is None else parameters[name]
    y = product(x, weight, bias, descriptor.batch_last, descriptor.precision, debug)
    rest = descriptor.epilogue[name is not None :]
    if not rest:
        return y
    own = {name: parameters[name] for epilogue in rest for name in epilogue.parameters}
    v = reference.finish(rest, y.to(accumulator(y.dtype)), own, descriptor.batch_last)
    return v.to(y.dtype)


def _listening(debug: bool):
    return events.on_stderr() if debug else nullcontext()


def _product(x, weight, bias, batch_last: bool, precision, debug: bool) -> torch.Tensor:
    descriptor = linear(tuple(weight.shape), batch_last, precision, bias is not None)
    with _listening(debug):
        return op.execute(descriptor, x, weight, None, {} if bias is None else {"bias": bias})


def _weight_gradient(grad, x, pattern, batch_last: bool, precision, debug: bool) -> torch.Tensor:
    with _listening(debug):
        return op.weight_gradient(grad, x, tuple(pattern), batch_last, precision)


def _whole(x, weight, descriptor: str, names: str, numbers, tensors, debug: bool) -> torch.Tensor:
    with _listening(debug):
        return op.execute(from_text(descriptor), x, weight, None, _values(names, numbers, tensors))


def _values(names: str, numbers, tensors) -> dict:
    """The parameters by name. AOTInductor hands over None for an empty list."""
    return dict(zip(names.split(), (*(numbers or ()), *(tensors or ())), strict=True))


def _whole_recorded(keyset, x, weight, descriptor, names, numbers, tensors, debug):
    """The operator as autograd sees it: with a gradient to record it is what :func:`recorded` does,
    else itself."""
    if torch.is_grad_enabled() and op.requires_gradient(x, weight, None, tensors or ()):
        values = _values(names, numbers, tensors)
        return recorded(from_text(descriptor), x, weight, values, debug)
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        return whole.redispatch(below, x, weight, descriptor, names, numbers, tensors, debug)


def _fake_product(x, weight, bias, batch_last, precision, debug):
    if weight.dim() != 4:
        raise ValueError(f"weight must have shape (a, b, c, d), got {tuple(weight.shape)}")
    shape = checks.check_operands(weight.shape, batch_last, x, weight)
    if bias is not None:
        checks.check_vector(shape[0 if batch_last else -1], "bias", bias, x)
    return x.new_empty(shape)


def _fake_weight_gradient(grad, x, pattern, batch_last, precision, debug):
    checks.check_gradient(grad, x, tuple(pattern), batch_last)
    return x.new_empty(tuple(pattern))


def _fake_whole(x, weight, descriptor, names, numbers, tensors, debug):
    made = from_text(descriptor)
    return x.new_empty(checks.check_operands(made.pattern, made.batch_last, x, weight))


for _name, _call, _fake in (
    ("kronecker_sparse", _whole, _fake_whole),
    ("kronecker_sparse_product", _product, _fake_product),
    ("kronecker_sparse_weight_gradient", _weight_gradient, _fake_weight_gradient),
):
    _library.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernlib::{_name}", _fake, lib=_library)
_library.impl("kronecker_sparse", _whole_recorded, "Autograd", with_keyset=True)


def _save_product(ctx, inputs, output) -> None:
    x, weight, _, *ctx.options = inputs
    ctx.pattern = tuple(weight.shape)
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None
    )


def _product_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    batch_last = ctx.options[0]
    to_x = to_weight = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = product(grad, weight.transpose(1, 2), None, *ctx.options)
    if ctx.needs_input_grad[1]:
        to_weight = weight_gradient(grad, x, ctx.pattern, *ctx.options)
    if ctx.needs_input_grad[2]:
        features = grad.shape[0 if batch_last else -1]
        flat = grad.reshape(features, -1).mT if batch_last else grad.reshape(-1, features)
        to_bias = flat.sum(0)
    return to_x, to_weight, to_bias, None, None, None


def _save_weight_gradient(ctx, inputs, output) -> None:
    grad, x, _, *ctx.options = inputs
    ctx.save_for_backward(
        grad if ctx.needs_input_grad[1] else None, x if ctx.needs_input_grad[0] else None
    )


def _weight_gradient_backward(ctx, to_weight):
    """Of ``to_weight``, which stands where the weight would: a product with it, and with its
    transpose."""
    grad, x = ctx.saved_tensors
    to_grad = to_x = None
    if ctx.needs_input_grad[0]:
        to_grad = product(x, to_weight, None, *ctx.options)
    if ctx.needs_input_grad[1]:
        to_x = product(grad, to_weight.transpose(1, 2), None, *ctx.options)
    return to_grad, to_x, None, None, None, None


torch.library.register_autograd(
    "kernlib::kronecker_sparse_product",
    _product_backward,
    setup_context=_save_product,
    lib=_library,
)
torch.library.register_autograd(
    "kernlib::kronecker_sparse_weight_gradient",
    _weight_gradient_backward,
    setup_context=_save_weight_gradient,
    lib=_library,
)
