"""The primitive of the family: products as they are given, without autocast and without a record of
gradients.

CPU tensors, and calls inside transforms of torch.func other than vmap, are computed by the
reference, on the matrix laid out densely.
"""

from __future__ import annotations

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.sparse import checks, plans, reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.kept import laid_out
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.tensors import check_frozen
from kernlib.runtime import products
from kernlib.runtime.arguments import autocast, parameter_key
from kernlib.runtime.operation import KERNELS, OPERATOR, REFERENCE
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    check_dense,
    is_differentiated,
    signature,
)

PLAIN, BIASED = SparseMatmul(), SparseMatmul((Bias(),))


def _key(descriptor: SparseMatmul, operands: tuple, out, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor; the matrix's layout and device, and whether it is
    frozen; then shapes, strides, dtypes, device, alignment and kinds of numbers. None where there
    can be no plan."""
    try:  # signature(x) written out, which saves 0.1 us
        w, x = operands
        key = (
            descriptor.text, w._key,  # a text, which a str hashes once
            x.shape, x.stride(), x.dtype, x.get_device(),
            p & 15 if (p := x.data_ptr()) >= LOWEST_ADDRESS else ~p, x.is_neg(),
        )  # fmt: skip
        if out is not None:
            key += signature(out)
        if parameters:
            for name, value in parameters.items():
                key += (name, parameter_key(value))
    except UNREADABLE:
        checks.check_kinds(descriptor, operands)
        check_dense(("x",), x=operands[1], out=out)
        return None
    return key


def _way(call: products.Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    values = (operands[1], out, *parameters.values())
    # Operators that take lists of tensors fail inside of transforms that differentiate.
    if not products.is_on_gpu(call.device) or is_differentiated() or any(map(_is_legacy, values)):
        return REFERENCE
    return OPERATOR if is_transformed(*values) else KERNELS


def _is_legacy(value) -> bool:
    """Whether ``is_grads_batched`` made a tensor."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def is_transformed(*values) -> bool:
    """Whether a tensor is inside a transform of torch.func."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(value, torch.Tensor) and wrapped(value) for value in values)


def _reference(descriptor: SparseMatmul, operands: tuple, parameters: dict) -> torch.Tensor:
    w, x = operands
    if w.frozen:
        check_frozen(w)
    return reference.sparse_matmul(descriptor, laid_out(w), x, parameters)


def _tensors(operands: tuple) -> tuple[torch.Tensor, ...]:
    w, x = operands
    return (x, *w.operands)


def _names(operands: tuple) -> tuple[str, ...]:
    return ("x", *(f"w.tensors[{name!r}]" for name in operands[0].tensors))


def _cast(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """x and vectors of the epilogue in the matrix's dtype."""
    w, x = operands
    (x,), parameters = autocast((x,), parameters, w.dtype)
    return (w, x), parameters


PRODUCT = products.Product(
    name="sparse_matmul",
    operators="kernlib.families.sparse.operators",
    key=_key,
    check=checks.check_call,
    way=_way,
    plan=plans.plan,
    reference=_reference,
    tensors=_tensors,
    names=_names,
    check_operands=checks.check_kinds,
    cast=_cast,
)
calls = products.bind(PRODUCT)


def multiply(w: SparseMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``W x + bias``, or ``W x`` if ``bias`` is None, without a record of gradients."""
    if bias is None:
        return calls.execute(PLAIN, (w, x), None, {})
    return calls.execute(BIASED, (w, x), None, {"bias": bias})
