"""The sparse op as operators of ``torch.library``, for compiled and recorded calls and inside
transforms of torch.func. Their gradients are those of eager calls.

A matrix goes in as its tensors and its layout, one text; so does its transpose, where it is known,
for gradients of few vectors. An empty list stands for one that is not.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.sparse import checks, gradients, operation, reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.fitted import fitted
from kernlib.families.sparse.matrix import SparseMatrix, parse_layout
from kernlib.families.sparse.tensors import TURNED, check_frozen, state_of
from kernlib.runtime.arguments import by_name, check_vector, for_operator, requires_gradient
from kernlib.runtime.dtypes import accumulator

_library = torch.library.Library("kernlib", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_MATRIX = "Tensor[] matrix, Tensor[] transposed, str layout, str transposed_layout"
# ``names`` are those of ``numbers``, then those of ``tensors``; one text with spaces, for
# torch.jit.trace takes no list of str.
_library.define(
    f"sparse_matmul(Tensor x, {_MATRIX}, str descriptor, str names, float[] numbers, "
    "Tensor[] tensors, bool debug) -> Tensor",
    tags=_TAGS,
)
_library.define(
    f"sparse_matmul_product(Tensor x, {_MATRIX}, Tensor? bias, bool turned, bool debug) -> Tensor",
    tags=_TAGS,
)
whole = torch.ops.kernlib.sparse_matmul.default
product = torch.ops.kernlib.sparse_matmul_product.default


def listed(w: SparseMatrix) -> tuple[list[torch.Tensor], list[torch.Tensor], str, str]:
    """A matrix as an operator takes it, with its transpose if that is known."""
    if w.frozen:
        check_frozen(w)
    turned = w.known_transpose()
    if turned is None:
        return [*w.operands], [], w.layout, ""
    return [*w.operands], [*turned.operands], w.layout, turned.layout


def called(descriptor: SparseMatmul, w: SparseMatrix, x, parameters: dict) -> torch.Tensor:
    """A checked call by its operator."""
    return whole(x, *listed(w), descriptor.text, *for_operator(parameters), False)


def recorded(descriptor: SparseMatmul, w: SparseMatrix, x, parameters: dict) -> torch.Tensor:
    """A checked call whose gradient is recorded."""
    return _recorded(descriptor, x, listed(w), parameters, False)


def _recorded(descriptor, x, matrix: tuple, parameters: dict, debug: bool) -> torch.Tensor:
    """The product with the leading bias by its operator, the other epilogues by torch's own on the
    rounded result."""
    made = gradients.parts(descriptor)
    bias = made.operands(parameters).get("bias")
    return made.finish(product(x, *matrix, bias, False, debug), parameters)


def _whole(
    x, matrix, transposed, layout, transposed_layout, descriptor, names, numbers, tensors, debug
):
    w = fitted(layout, matrix)
    with events.on_stderr() if debug else nullcontext():
        return operation.execute(
            from_text(descriptor), w, x, None, by_name(names, numbers, tensors)
        )


def _product(x, matrix, transposed, layout, transposed_layout, bias, turned, debug):
    w = fitted(layout, matrix)
    with events.on_stderr() if debug else nullcontext():
        if not turned:
            return gradients.product(w, x, bias)
        return gradients.turned_product(w, _given_transpose(w, transposed_layout, transposed), x)


def _given_transpose(w: SparseMatrix, layout: str, tensors: list) -> SparseMatrix | None:
    """The transpose that a product was recorded with, but not behind a write to one of the two that
    torch has counted: a compiled program is given the same tensors for ever."""
    if not tensors:
        return None
    turned = fitted(layout, tensors)
    made = getattr(tensors[0], TURNED, None)  # lost where a program was saved and loaded
    return turned if made is None or made == (state_of(w), state_of(turned)) else None


def _whole_recorded(keyset, x, *rest):
    """The operator as autograd sees it: with a gradient to record it is the product, and torch's
    own operators behind it; else itself."""
    *matrix, descriptor, names, numbers, tensors, debug = rest
    if torch.is_grad_enabled() and requires_gradient(tensors or (), x):
        values = by_name(names, numbers, tensors)
        return _recorded(from_text(descriptor), x, tuple(matrix), values, debug)
    with torch._C._AutoDispatchBelowAutograd():
        # AOTInductor hands over None for an empty list.
        rest = [[] if value is None else value for value in rest]
        return whole.redispatch(keyset & torch._C._after_autograd_keyset, x, *rest)


def _fake_whole(x, matrix, transposed, layout, *rest):
    _, shape, dtype, _ = parse_layout(layout)
    return x.new_empty(checks.check_x(shape, dtype, matrix[0].device, x))


def _fake_product(x, matrix, transposed, layout, transposed_layout, bias, turned, debug):
    _, shape, dtype, _ = parse_layout(layout)
    shape = shape[::-1] if turned else shape
    made = checks.check_x(shape, dtype, matrix[0].device, x)
    if bias is not None:
        check_vector(shape[0], "bias", bias, x)
    return x.new_empty(made)


for _name, _call, _fake in (
    ("sparse_matmul", _whole, _fake_whole),
    ("sparse_matmul_product", _product, _fake_product),
):
    _library.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernlib::{_name}", _fake, lib=_library)
_library.impl("sparse_matmul", _whole_recorded, "Autograd", with_keyset=True)


def _save(ctx, inputs, output) -> None:
    _, matrix, transposed, layout, transposed_layout, _, turned, debug = inputs
    ctx.sizes = len(matrix)
    ctx.options = layout, transposed_layout, turned, debug
    ctx.save_for_backward(*matrix, *transposed)


def _backward(ctx, grad):
    layout, transposed_layout, turned, debug = ctx.options
    saved = ctx.saved_tensors
    lists = [*saved[: ctx.sizes]], [*saved[ctx.sizes :]]
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = product(grad, *lists, layout, transposed_layout, None, not turned, debug)
    if ctx.needs_input_grad[5]:
        to_bias = gradients.bias_gradient(grad)
    constant = [[None] * len(tensors) for tensors in lists]
    return to_x, *constant, None, None, to_bias, None, None


torch.library.register_autograd(
    "kernlib::sparse_matmul_product", _backward, setup_context=_save, lib=_library
)


# vmap: the mapped axis of x is one more of its leading dimensions. Parameters that are mapped over
# meet the rounded product.


def _vmap_whole(info, dims, x, *rest):
    *matrix, descriptor, names, numbers, tensors, debug = rest
    _refuse_mapped_matrix(dims)
    inner = [None] * len(tensors) if dims[8] is None else dims[8]
    if all(dim is None for dim in inner):
        return whole(x.movedim(dims[0], 0), *rest), 0
    y = _mapped_product(info, dims, x, matrix, False, debug)
    values = [_beside(t, dim, y) for t, dim in zip(tensors, inner, strict=True)]
    made, wide = from_text(descriptor), y.to(accumulator(y.dtype))
    v = reference.finish(made.epilogue, wide, by_name(names, numbers, values))
    return v.to(y.dtype), 0


def _vmap_product(info, dims, x, *rest):
    *matrix, bias, turned, debug = rest
    _refuse_mapped_matrix(dims)
    if dims[5] is None:
        return product(x.movedim(dims[0], 0), *rest), 0
    y = _mapped_product(info, dims, x, matrix, turned, debug)
    wide = accumulator(y.dtype)
    return (y.to(wide) + _beside(bias, dims[5], y).to(wide)).to(y.dtype), 0


def _mapped_product(info, dims: tuple, x, matrix, turned: bool, debug: bool) -> torch.Tensor:
    """The product alone, the mapped axis first, be x mapped over or not."""
    if dims[0] is not None:
        return product(x.movedim(dims[0], 0), *matrix, None, turned, debug)
    y = product(x, *matrix, None, turned, debug)
    return y.expand(info.batch_size, *y.shape)


def _beside(t: torch.Tensor, dim: int | None, y: torch.Tensor) -> torch.Tensor:
    """A parameter that broadcasts with y, whose first axis is the mapped one: a vector's values
    along the last."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *[1] * (y.dim() - t.dim()), *t.shape[1:])


def _refuse_mapped_matrix(dims: tuple) -> None:
    """Raises RuntimeError for a matrix that is mapped over: it is one for all."""
    if any(dim is not None for part in dims[1:3] if part is not None for dim in part):
        raise RuntimeError("torch.vmap maps x and the epilogue's parameters, no compressed matrix")


torch.library.register_vmap("kernlib::sparse_matmul", _vmap_whole, lib=_library)
torch.library.register_vmap("kernlib::sparse_matmul_product", _vmap_product, lib=_library)
