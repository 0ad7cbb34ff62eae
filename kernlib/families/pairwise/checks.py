"""Everything that can be wrong with a pairwise call, said in the caller's words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.descriptors.base import as_int, check_flag, refuse_argument, shown
from kernlib.errors import warn
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import CODES, Pairwise
from kernlib.families.pairwise.lowering import problem as lowering
from kernlib.families.pairwise.lowering.finish import EXPONENT_CODE
from kernlib.runtime import numbers
from kernlib.runtime.dtypes import DTYPE_NAMES, accumulator
from kernlib.runtime.numbers import check_kind, extremes, host_value
from kernlib.runtime.tensors import (
    broadcast_shapes,
    check_dense,
    check_memory,
    check_out_shape,
    common_batch,
    refuse_any_overlap,
    refuse_other,
    refuse_transforms,
    stand_ins,
)

COMPUTE_MODES = (
    "use_mm_for_euclid_dist_if_necessary",
    "use_mm_for_euclid_dist",
    "donot_use_mm_for_euclid_dist",
)
INNER_SLOT, OUTER_SLOT = 0, 2  # of inner_p and outer_p among a plan's numbers
MAX_OFFSET = 1 << 61
NO_TRANSFORMS = (
    "pairwise kernels do not support: call outside it, on a batch (L, M, K) in place of vmap"
)
MAPPED_ALONE = (
    "pairwise kernels support as torch.vmap alone, where they take no out: gradients are "
    "torch.autograd.grad's, outside of torch.func"
)
_OF_EPILOGUES = ("epsilon", "regularization")
_EXPONENTS = ("p", "inner_p", "outer_p")
_NOT_NEGATIVE = {  # argument to what its smallest value is said to be
    "p": "0 or greater (inf for the maximum)",
    "inner_p": "0 or greater (inf for the maximum)",
    "epsilon": "0 or greater",
}


class Call(NamedTuple):
    """A checked call."""

    m: int
    n: int
    k: int
    batch: int
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device


def check_call(descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    if descriptor.categories:
        refuse_categories(descriptor)
    check_tensors(a=a, b=b, out=out)
    _check_second(descriptor, b)
    second = a if b is None else b
    _check_inputs(a, second)
    for name, offset in (("row_offset", row_offset), ("col_offset", col_offset)):
        if abs(as_int(name, offset)) > MAX_OFFSET:
            raise ValueError(f"{name} must be at most 2**61 in magnitude, got {shown(offset)}")
    if descriptor.symmetric and row_offset != col_offset:
        raise ValueError(
            f"symmetric=True needs row_offset == col_offset, got {row_offset} and {col_offset}"
        )
    _check_hyperparameters(descriptor, hyperparameters, a.device)
    check_flag("accumulate", accumulate)
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out, and no out is given")
    sizes = (a.shape[-2], second.shape[-2], a.shape[-1])
    batch, shape = _output(a, second, out, hyperparameters)
    if out is not None:
        check_memory(out)
    elif a.dim() == second.dim() == 2 and batch == sizes[2] > 1:
        _warn_of_features(hyperparameters, batch)
    return Call(*sizes, batch, shape, a.dtype, a.dtype if out is None else out.dtype, a.device)


def refuse_categories(descriptor: Pairwise) -> None:
    """Raises ValueError for categories where nothing would add their tables."""
    raise ValueError(
        f"{descriptor.describe()} has categories, which this function does not take: run_kernel "
        "does, and reductions such as kernel_matmul"
    )


def refuse_more(descriptor: Pairwise, more: tuple) -> None:
    """Raises TypeError for tensors behind a and b."""
    raise TypeError(
        f"{descriptor.describe()} takes tensors a and b, got {2 + len(more)}; all that follows "
        f"them has a name: {descriptor.call}"
    )


def refuse_missing(descriptor: Pairwise) -> None:
    """Raises TypeError for a call without a."""
    raise TypeError(f"a must be a tensor, got None; the call is {descriptor.call}")


def check_shapes(a, b, out, tensors: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """The output's shape, after the checks that need no descriptor and no value: sizes may be
    symbols. Raises ValueError and TypeError."""
    second = a if b is None else b
    _check_inputs(a, second)
    for name, tensor in tensors.items():
        check_kind(name, tensor)
        _check_device(name, tensor, a.device)
    return _output(a, second, out, tensors)[1]


def _output(a, second, out, values: dict) -> tuple[int, tuple[int, ...]]:
    """The batch and the output's shape, an ``out`` checked against it."""
    batch = _batch(a, second, out, values)
    flat = a.dim() == second.dim() == 2 and batch == 1 if out is None else out.dim() == 2
    shape = (a.shape[-2], second.shape[-2]) if flat else (batch, a.shape[-2], second.shape[-2])
    if out is not None:
        _check_out(out, a, shape, batch)
    return batch, shape


def check_tensors(a, b, out) -> None:
    """Raises TypeError for what is neither a dense tensor nor None; a itself must be a tensor."""
    check_dense(("a",), a=a, b=b, out=out)


def _check_second(descriptor: Pairwise, b) -> None:
    if descriptor.symmetric and b is not None:
        raise ValueError("symmetric=True computes K(a, a): leave b out, or use symmetric=False")
    if not descriptor.symmetric and b is None:
        raise ValueError("b is missing; for K(a, a) pass a twice or use symmetric=True")


def _check_inputs(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() not in (2, 3):
            single = (
                f"; one point is {name}[None], and what calls a metric for each pair of rows, as "
                "scikit-learn does, takes all at once by metric='precomputed'"
            )
            raise ValueError(
                f"{name} must be (N, K) or (L, N, K), got shape {tuple(tensor.shape)}"
                f"{single if tensor.dim() == 1 else ''}"
            )
    _check_same_kind(a=a, b=b)
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"a and b must have the same number of features, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )


def _check_same_kind(**pair: torch.Tensor) -> None:
    """Two tensors of one known dtype on one device. Raises TypeError and ValueError."""
    for name, tensor in pair.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} must be one of {', '.join(DTYPE_NAMES.values())}, got {tensor.dtype}"
            )
    names, (x, y) = " and ".join(pair), pair.values()
    if x.dtype != y.dtype:
        raise TypeError(f"{names} must have one dtype, got {x.dtype} and {y.dtype}")
    if x.device != y.device:
        raise ValueError(f"{names} must be on one device, got {x.device} and {y.device}")


def _check_hyperparameters(descriptor: Pairwise, values: dict, device: torch.device) -> None:
    scale = {"inner_scale"} if isinstance(descriptor.inner, norms.ExpPower) else set()
    required = _check_exponents_given(descriptor, values) | scale | set(descriptor.parameters)
    allowed = _takes(descriptor)
    for name, value in values.items():
        if name in _OF_EPILOGUES and not descriptor.epilogue:
            raise ValueError(f"{name} needs an epilogue, and {descriptor.describe()} has none")
        if name in CODES:
            raise TypeError(f"{name} needs categories in the descriptor: their number")
        if name not in allowed:
            refuse_unknown(descriptor, name)
        number = host_value(name, value)
        if number is not None:
            check_host(name, number, descriptor.positive)
            _check_finite_power(descriptor, name, number)
            continue
        check_tensor(name, value, descriptor.positive)
        for number in extremes(value):
            _check_finite_power(descriptor, name, number)
        _check_device(name, value, device)
    missing = sorted(required - set(values))
    if missing:
        if "inner_p" in missing:  # which p gives as well, and with it the outer exponent
            missing[missing.index("inner_p")] = "p (or inner_p)"
        needed = ", ".join(missing)
        raise ValueError(f"{descriptor.describe()} needs {needed}: {descriptor.call}")


def _takes(descriptor: Pairwise) -> set[str]:
    """The names of a descriptor's hyperparameters."""
    stages = {
        ("p", "inner_p"): isinstance(descriptor.inner, norms.EXPONENTS),
        ("inner_scale",): isinstance(descriptor.inner, norms.ExpPower),
        ("outer_p",): isinstance(descriptor.outer, norms.Power),
        _OF_EPILOGUES: bool(descriptor.epilogue),
    }
    hyperparameters = {name for names, takes in stages.items() if takes for name in names}
    return hyperparameters | set(descriptor.parameters)


def check_recorded_offsets(row_offset, col_offset) -> None:
    """Raises TypeError unless an offset is an int or a symbol: an operator would refuse it in
    torch's words."""
    for name, offset in (("row_offset", row_offset), ("col_offset", col_offset)):
        if not isinstance(offset, torch.SymInt):
            as_int(name, offset)


def check_names(descriptor: Pairwise, values: Iterable[str]) -> None:
    """Raises TypeError for a keyword that no call of a descriptor takes, with categories or not."""
    names = (*CODES, *_takes(descriptor), *descriptor.options, *_OF_EPILOGUES, *_EXPONENTS)
    for name in values:
        if name not in names:
            refuse_unknown(descriptor, name)


def refuse_unknown(descriptor: Pairwise, name: str) -> NoReturn:
    """Raises TypeError for a keyword that a call does not take."""
    codes = CODES if descriptor.categories else ()
    refuse_argument(descriptor, name, (*codes, *sorted(_takes(descriptor))))


def _check_finite_power(descriptor: Pairwise, name: str, value: float) -> None:
    """An exponent of inf has a meaning for the inner stage Power alone."""
    power = isinstance(descriptor.inner, norms.Power)
    if name in ("p", "inner_p") and math.isinf(value) and not power:
        raise ValueError(f"{name} must be finite for inner={descriptor.inner}, got {value}")


def check_host(name: str, value: float, positive: frozenset[str]) -> None:
    """Checks of a host value by its name alone. Raises ValueError."""
    if name not in _NOT_NEGATIVE:
        numbers.check_host(name, value, positive)
    elif not value >= 0:
        raise ValueError(f"{name} must be {_NOT_NEGATIVE[name]}, got {value}")


def check_tensor(name: str, value: torch.Tensor, positive: frozenset[str]) -> None:
    """A hyperparameter tensor is real, of shape () or (L,), and in host memory holds values that
    would do as numbers. Raises ValueError, TypeError."""
    numbers.check_tensor(name, value, positive, check_host)


def _check_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device and value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}, the inputs on {device}: move it there")


def _check_exponents_given(descriptor: Pairwise, values: dict) -> set[str]:
    """The exponents the call must give, after checking that those it gives fit together."""
    inner = isinstance(descriptor.inner, norms.EXPONENTS)
    outer = isinstance(descriptor.outer, norms.Power)
    passed = {name for name in _EXPONENTS if name in values}
    if "p" in passed and not inner:
        raise ValueError(f"p needs inner=Power(), and {descriptor.describe()} has another")
    if "p" in passed and isinstance(descriptor.inner, norms.Power) and len(passed) > 1:
        raise ValueError("p sets inner_p and outer_p: give either p or them")
    if {"p", "inner_p"} <= passed:
        raise ValueError("p and inner_p are two names of one exponent: give either")
    if "inner_p" in passed and not inner:
        raise ValueError(f"inner_p needs inner=Power(), and {descriptor.describe()} has another")
    if "outer_p" in passed and not outer:
        raise ValueError(f"outer_p needs outer=Power(), and {descriptor.describe()} has another")
    inner, outer = inner and "p" not in passed, outer and not follows_inner(descriptor, values)
    return {name for name, needed in (("inner_p", inner), ("outer_p", outer)) if needed}


def slots(descriptor: Pairwise) -> dict[str, int]:
    """Place of each hyperparameter's number among a plan's numbers and addresses."""
    names = (*lowering.COMMON_SCALARS, *descriptor.parameters)
    return {"p": INNER_SLOT} | {name: 2 * index for index, name in enumerate(names)}


def follows_inner(descriptor: Pairwise, values: dict) -> bool:
    """Whether the outer exponent is the reciprocal of the inner one."""
    if isinstance(descriptor.outer, norms.Root):
        return True
    powers = isinstance(descriptor.inner, norms.Power) and isinstance(descriptor.outer, norms.Power)
    return powers and "p" in values


def exponents(descriptor: Pairwise, values: dict) -> tuple[float | str, float | str]:
    """The kinds of inner and outer exponent by which lowering chooses code."""
    inner = values.get("p", values.get("inner_p"))
    outer = values.get("outer_p")
    codes = lowering.inner_codes(descriptor)
    on_device = isinstance(inner, torch.Tensor)
    return (
        ("device" if "device" in codes else "any") if on_device else _own(inner, codes),
        "any" if isinstance(outer, torch.Tensor) else _own(outer, EXPONENT_CODE),
    )


def _own(value, codes: dict) -> float | str:
    """The exponent itself where it has code of its own."""
    return float(value) if value is not None and value in codes else "any"


def _warn_of_features(values: dict, features: int) -> None:
    """Warns of a value for each feature, which makes a matrix each; one call is as right as the
    other, and nothing in the result says which was meant."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape[0] == features:
            warn(
                f"{name} has a value for each of {features} matrices, of shape (L, M, N), and none "
                f"for each of the {features} features: that is lengthscale=. Points of shape "
                "(1, N, K) say that matrices are meant"
            )


def _batch(a, b, out, values: dict) -> int:
    """The batch all arguments broadcast to. Raises ValueError when two differ."""
    sizes = {
        name: tensor.shape[0]
        for name, tensor in (("a", a), ("b", b), ("out", out))
        if tensor is not None and tensor.dim() == 3
    }
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            sizes[name] = value.shape[0]
    return common_batch(sizes)


def _check_out(out: torch.Tensor, a: torch.Tensor, shape: tuple[int, ...], batch: int) -> None:
    if out.dim() == 2 and batch != 1:
        raise ValueError(f"out must be 3-D for a batch of {batch}, got shape {tuple(out.shape)}")
    check_result(out, shape, a)


def check_result(out: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor) -> None:
    """Raises ValueError or TypeError for an ``out`` of another shape, device or dtype than a call
    on ``a`` writes."""
    check_out_shape(out, shape)
    if out.device != a.device:
        raise ValueError(f"out must be on the inputs' device {a.device}, got {out.device}")
    if out.dtype not in (a.dtype, accumulator(a.dtype)):
        dtypes = " or ".join(str(t) for t in dict.fromkeys((a.dtype, accumulator(a.dtype))))
        raise TypeError(f"out must be {dtypes} for {a.dtype} inputs, got {out.dtype}")


def ranges_meet(pointers: tuple[int, int, int], spans: tuple[int, int, int]) -> bool:
    """Whether out's range of memory meets that of an input. For two inputs written out: a third of
    the time that :func:`kernlib.runtime.tensors.ranges_meet` takes."""
    a, b, out = pointers
    end = out + spans[2]
    return (out < a + spans[0] and a < end) or (out < b + spans[1] and b < end)


def compute_mode(mode: str) -> None:
    """Raises ValueError for a mode torch.cdist would not take."""
    if not isinstance(mode, str) or mode not in COMPUTE_MODES:
        raise ValueError(f"compute_mode must be one of {COMPUTE_MODES}, got {shown(mode)}")


def are_matrices(x1: torch.Tensor, x2: torch.Tensor) -> bool:
    """Whether two cdist inputs have no batch. Raises TypeError and ValueError for bad ones."""
    for name, x in (("x1", x1), ("x2", x2)):
        if not isinstance(x, torch.Tensor):
            refuse_other(name, x)
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(x.shape)}")
    if x1.shape[-1] != x2.shape[-1]:
        raise ValueError(
            f"x1 and x2 must have the same number of columns, got {tuple(x1.shape)} and "
            f"{tuple(x2.shape)}"
        )
    return x1.dim() == x2.dim() == 2


def check_distance(x1: torch.Tensor, x2: torch.Tensor, out) -> None:
    """Checks of the tensors of a cdist, once are_matrices has passed, by cdist's names. Raises
    TypeError, ValueError and RuntimeError."""
    if is_dynamo_compiling():
        return  # it follows neither transforms nor addresses; the operator has its own words
    check_dense(("x1", "x2"), x1=x1, x2=x2, out=out)
    refuse_transforms(MAPPED_ALONE, x1=x1, x2=x2, out=out)
    _check_same_kind(x1=x1, x2=x2)
    refuse_out(out, x1=x1, x2=x2, out=out)
    refuse_any_overlap(out, x1=x1, x2=x2)


def refuse_out(out, /, **values) -> None:
    """Raises RuntimeError, naming the argument that requires a gradient, for an ``out``."""
    if out is None or not torch.is_grad_enabled():
        return
    for name, value in values.items():
        if getattr(value, "requires_grad", False):
            raise RuntimeError(
                f"{name} requires a gradient, which a call that writes out does not record: leave "
                f"out and accumulate away, pass {name}.detach(), or call under torch.no_grad()"
            )


def check_has_sums(p, asked: str) -> None:
    """Raises ValueError, which says what ``asked`` for power sums, for an exponent of inf, which
    has none: a number, or one in the memory of a tensor that the host can read."""
    if isinstance(p, torch.Tensor):
        if is_dynamo_compiling() or is_in_torch_dispatch_mode() or stand_ins(p):
            return  # its value is not known yet
        check_kind("p", p)
        refuse_transforms(NO_TRANSFORMS, p=p)
    numbers_of_p = extremes(p) if isinstance(p, torch.Tensor) else (host_value("p", p),)
    if math.inf in numbers_of_p:
        raise ValueError(f"{asked} asks for power sums, and p=inf has none; ask for the root")


def broadcast_batches(x1: torch.Tensor, x2: torch.Tensor):
    """The broadcast batch shape of two cdist inputs, and both as (L, M, K)."""
    try:
        batch = broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"batches of x1 and x2 do not broadcast: {tuple(x1.shape[:-2])}, {tuple(x2.shape[:-2])}"
        ) from None
    return tuple(batch), _flat(x1, batch), _flat(x2, batch)


def _flat(x: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    expanded = x.expand(*batch, *x.shape[-2:])
    return expanded if len(batch) == 1 else expanded.flatten(0, -3)


def flat_out(out: torch.Tensor) -> torch.Tensor:
    """``out`` as (L, M, N) without copying. Raises ValueError where its strides forbid it."""
    if out.dim() == 3:
        return out
    try:
        return out.view(math.prod(out.shape[:-2]), *out.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"the batch dimensions of out (strides {out.stride()}) cannot be viewed as one; pass a "
            "contiguous out"
        ) from None
