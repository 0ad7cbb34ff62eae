"""Chains of two factors as one kernel: which calls it takes, and their plans.

Where a gradient is recorded it is the product with the leading bias. Where the kernel does not take
a chain, or its tiles would leave half of a GPU idle, that is a call for each factor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernlib.descriptors.epilogues import Bias
from kernlib.families.kronecker_sparse import operation, plans, reference
from kernlib.families.kronecker_sparse.chain import master_weights
from kernlib.families.kronecker_sparse.chain.kind import HALVES, is_of_kind
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparseChain
from kernlib.families.kronecker_sparse.kernels.chain import fused_chain
from kernlib.families.kronecker_sparse.kernels.chain.fused_chain import (
    Chain,
    ChainScope,
    FusedChain,
)
from kernlib.families.kronecker_sparse.kernels.steps.cast import Cast
from kernlib.families.kronecker_sparse.lowering.problem import (
    Layout,
    OutLayout,
    Pattern,
    Problem,
)
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from kernlib.runtime import products
from kernlib.runtime.arguments import check_parameters, check_same_kind, parameter_key
from kernlib.runtime.devices import arch_of, lower_on
from kernlib.runtime.dtypes import FLOAT_TYPES, KERNEL_TYPES
from kernlib.runtime.operation import KERNELS
from kernlib.runtime.products import Call, ProductPlan, make_plan
from kernlib.runtime.tensors import UNREADABLE, check_dense, is_lazy, signature, stand_ins

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec

BIAS, H200 = (Bias(),), Gpu("sm_90a", 132)
NAMES = "x", "weight1", "weight2"


def may_take(chain: KroneckerSparseChain, operands: tuple, masters: bool = False) -> bool:
    """Whether it is a chain of the kind that the kernel takes, of tensors of its dtypes that are
    not on a CPU. ``masters`` says whether weights may be master weights."""
    if not is_of_kind(chain):
        return False
    if len(operands) != 3 or not all(isinstance(t, torch.Tensor) for t in operands):
        return False
    if operands[0].dtype not in HALVES or operands[0].device.type == "cpu":
        return False
    if not masters and master_weights.are_there(operands):
        return False
    return not (is_lazy(*operands) or stand_ins(*operands))


def takes(
    chain: KroneckerSparseChain, operands: tuple, parameters: dict, masters: bool = False
) -> bool:
    """Whether the kernel computes a call on these tensors; in a rehearsal, whether it does on all
    of the GPUs; those on which it does note its kernels. False for wrong tensors too, about which
    the factors' calls raise. Raises UnsupportedError for devices without a backend."""
    call = _sound(chain, operands, parameters, masters)
    return call is not None and None not in _lowered(chain, call, operands)


def is_sound(
    chain: KroneckerSparseChain, operands: tuple, parameters: dict, masters: bool = False
) -> bool:
    """Whether nothing is wrong with a call of the kind that :func:`may_take` says, and kernels
    compute it, be it in one launch or one for each factor. Raises UnsupportedError for devices
    without a backend."""
    return _sound(chain, operands, parameters, masters) is not None


def _sound(chain: KroneckerSparseChain, operands, parameters: dict, masters: bool) -> Call | None:
    if not may_take(chain, operands, masters):
        return None
    try:
        call = _check(chain, operands, None, parameters)
    except (TypeError, ValueError):
        return None
    is_ours = call.batch and operation.way(call, chain, operands, None, parameters) == KERNELS
    return call if is_ours else None


def is_fused(patterns: tuple[Pattern, ...], rows: int) -> bool:
    """Whether a chain of these patterns with a bias, of contiguous tensors in half precision, is
    one kernel on an H200."""
    if len(patterns) != 2:
        return False
    first, last = (_contiguous(pattern, rows) for pattern in patterns)
    return fused_chain.lower(Chain(first, last, BIAS), H200) is not None


def _contiguous(pattern: Pattern, rows: int) -> Problem:
    a, b, c, d = pattern
    left, right = Layout(c * d, 1, a * c * d, d), Layout(b * c * d, 1, c * d, d)
    return Problem(a, d, rows, b, c, left, right, OutLayout(b * d, 1, a * b * d, d), "float16")


def _check(chain: KroneckerSparseChain, operands: tuple, out, parameters: dict) -> Call:
    """Raises ValueError and TypeError for what a signature decides."""
    operands, parameters = master_weights.stand_ins(operands, parameters)
    (x, weight, second), (first, last) = operands, chain.factors
    check_dense(NAMES, **dict(zip(NAMES, operands, strict=True)))
    operation.check_operands(first.pattern, False, x, weight)
    check_same_kind("x", x, "weight", second)
    operation.check_operands(last.pattern, False, _hidden(chain, operands), second.to("meta"))
    check_parameters(last, last.out_features, parameters, x, True, FLOAT_TYPES)
    batch = math.prod(x.shape[:-1])
    return Call(batch, (*x.shape[:-1], last.out_features), x.dtype, x.device)


def _hidden(chain: KroneckerSparseChain, operands: tuple) -> torch.Tensor:
    """A stand-in for the result of the first factor."""
    x, *_ = operands
    return x.new_empty((*x.shape[:-1], chain.factors[0].out_features), device="meta")


def _lowered(chain: KroneckerSparseChain, call: Call, operands: tuple) -> list[Lowered | None]:
    """The launches of a checked call, for each number of multiprocessors that is asked for; None
    where it is not for this kernel."""
    (x, weight, second), _ = master_weights.stand_ins(operands, {})
    first, last = chain.factors
    before = call._replace(out_shape=(*x.shape[:-1], first.out_features))
    problem, copy, _ = plans.problem_of(first, before, x, weight, None)
    following, *_ = plans.problem_of(last, call, _hidden(chain, operands), second, None)
    device, results = x.get_device(), []
    pair, arch = Chain(problem, following, last.epilogue), arch_of(device)
    if copy is not None or not FusedChain().takes(pair, arch):
        return [None]

    def lower(count: int) -> Lowered | None:
        results.append(fused_chain.lower(pair, Gpu(arch, count)))
        return results[-1]

    lower_on(lower, device)
    return results


def _plan(call: Call, chain: KroneckerSparseChain, operands, out, parameters) -> ProductPlan:
    request = chain.factors[-1], operands, out, parameters
    lowered, *_ = _lowered(chain, call, operands)
    if master_weights.are_there(operands):
        lowered = _with_masters(lowered, chain, operands, parameters)
    return make_plan(operands, call, request, _place, NAMES, lowered, False)


def _with_masters(
    lowered: Lowered, chain: KroneckerSparseChain, operands: tuple, parameters: dict
) -> Lowered:
    """The launches of a call with master weights."""
    x, weight, second = operands
    masters = {"weight1": weight, "weight2": second}
    bias = master_weights.bias_name(chain)
    if bias is not None:
        masters["vector0"] = parameters[bias]
    return master_weights.lower(lowered, x.dtype, masters)


def _place(operands: tuple) -> tuple[list[int], None]:
    return [t.data_ptr() for t in operands], None


def _key(chain: KroneckerSparseChain, operands: tuple, out, parameters: dict) -> tuple | None:
    try:
        key = chain.text, *map(signature, operands)
        for name, value in parameters.items():
            key += (name, parameter_key(value))
    except (*UNREADABLE, IndexError):
        return None
    return key


def _reference(chain: KroneckerSparseChain, operands: tuple, parameters: dict) -> torch.Tensor:
    x, *weights = operands
    return reference.chain(chain, x, tuple(weights), parameters)


PRODUCT = products.Product(
    name="kronecker_sparse_chain",
    operators="kernlib.families.kronecker_sparse.operators",
    key=_key,
    check=_check,
    way=operation.way,
    plan=_plan,
    reference=_reference,
    tensors=tuple,
    names=lambda operands: NAMES,
    check_operands=operation.check_kinds,
    cast=lambda operands, parameters: (operands, parameters),  # whoever asks for it has cast them
)


def variants(chain: KroneckerSparseChain, arch: str, dtypes: tuple) -> list[KernelSpec]:
    """The kernels of a chain for inputs of ``dtypes``; none where it is not for this kernel."""
    if not is_of_kind(chain):
        return []
    first, last = chain.factors
    names = [KERNEL_TYPES[dtype] for dtype in dtypes if dtype in HALVES]
    scope = ChainScope((first.pattern, last.pattern), tuple(names), arch)
    specs = FusedChain().specs(last.epilogue, scope, arch)
    return specs + (Cast().specs_of(names) if specs else [])
