"""The Kronecker-sparse op as operators of ``torch.library``, for compiled and recorded calls and
inside transforms of torch.func. Their gradients are those of eager calls."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.kronecker_sparse import checks, gradients, operation
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse
from kernlib.runtime.arguments import by_name, check_vector, requires_gradient

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


def recorded(
    descriptor: KroneckerSparse, x, weight, parameters: dict, debug: bool = False
) -> torch.Tensor:
    """A checked call whose gradient is recorded: the product with the leading bias by its operator,
    the other epilogues by torch's own on the rounded result."""
    made = gradients.parts(descriptor)
    bias = made.operands(parameters).get("bias")
    y = product(x, weight, bias, descriptor.batch_last, descriptor.precision, debug)
    return made.finish(y, parameters)


def _whole(x, weight, descriptor: str, names: str, numbers, tensors, debug: bool) -> torch.Tensor:
    with events.on_stderr() if debug else nullcontext():
        return operation.execute(
            from_text(descriptor), x, weight, None, by_name(names, numbers, tensors)
        )


def _whole_recorded(keyset, x, weight, descriptor, names, numbers, tensors, debug):
    """The operator as autograd sees it: with a gradient to record it is what :func:`recorded` does,
    else itself."""
    if torch.is_grad_enabled() and requires_gradient(tensors or (), x, weight):
        values = by_name(names, numbers, tensors)
        return recorded(from_text(descriptor), x, weight, values, debug)
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        lists = numbers or [], tensors or []  # AOTInductor hands over None for an empty one
        return whole.redispatch(below, x, weight, descriptor, names, *lists, debug)


def _fake_product(x, weight, bias, batch_last, precision, debug):
    if weight.dim() != 4:
        raise ValueError(f"weight must have shape (a, b, c, d), got {tuple(weight.shape)}")
    shape = checks.check_operands(weight.shape, batch_last, x, weight)
    if bias is not None:
        check_vector(shape[0 if batch_last else -1], "bias", bias, x, checks.TYPES)
    return x.new_empty(shape)


def _fake_weight_gradient(grad, x, pattern, batch_last, precision, debug):
    checks.check_gradient(grad, x, tuple(pattern), batch_last)
    return x.new_empty(tuple(pattern))


def _fake_whole(x, weight, descriptor, names, numbers, tensors, debug):
    made = from_text(descriptor)
    return x.new_empty(checks.check_operands(made.pattern, made.batch_last, x, weight))


for _name, _call, _fake in (
    ("kronecker_sparse", _whole, _fake_whole),
    ("kronecker_sparse_product", gradients.product, _fake_product),
    ("kronecker_sparse_weight_gradient", gradients.weight_gradient, _fake_weight_gradient),
):
    _library.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernlib::{_name}", _fake, lib=_library)
_library.impl("kronecker_sparse", _whole_recorded, "Autograd", with_keyset=True)


def _save_product(ctx, inputs, output) -> None:
    x, weight, _, *options = inputs
    gradients.save_product(ctx, x, weight, options)


def _product_backward(ctx, grad):
    found = gradients.product_gradients(ctx, grad, product, weight_gradient)
    return *found, None, None, None


def _save_weight_gradient(ctx, inputs, output) -> None:
    grad, x, _, *options = inputs
    gradients.save_weight_gradient(ctx, grad, x, options)


def _weight_gradient_backward(ctx, to_weight):
    found = gradients.weight_gradient_gradients(ctx, to_weight, product)
    return *found, None, None, None, None


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
