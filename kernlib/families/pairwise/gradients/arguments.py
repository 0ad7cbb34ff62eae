"""Everything that can be wrong with a call of a pair gradient, said in the caller's words."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernlib.descriptors.base import check_flag, shown
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.checks import check_result
from kernlib.families.pairwise.descriptor import OPERATORS
from kernlib.runtime import numbers
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.numbers import host_value
from kernlib.runtime.tensors import check_dense, check_memory, common_batch, refuse_distributed

SMALLEST = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022}  # that no instruction flushes
STAGES = (
    stages.Identity, stages.Abs, stages.Square, stages.Sqrt, stages.Power, stages.ExpPower,
)  # fmt: skip
NO_TRANSFORMS = "pair gradients do not support: call outside it, on a batch in place of vmap"


class Kind(NamedTuple):
    """What is computed. ``plain``: in the words of cdist_grad, with transposed operands and
    without the factor p; else in those of pair_gradient. ``scaled``: slopes of a power without the
    factor p, of differences times the ``scales`` of their pairs."""

    operator: str
    inner: object
    first: bool
    plain: bool
    scaled: bool = False

    @property
    def names(self) -> tuple[str, str, str, str, str]:
        """The operands' names."""
        return ("d", "b", "a", "c", "scales") if self.plain else Operands._fields

    @property
    def exponents(self) -> tuple[str, ...]:
        """The numbers that the slope needs."""
        if isinstance(self.inner, stages.ExpPower):
            return ("p", "inner_scale")
        return ("p",) if isinstance(self.inner, stages.Power) else ()


class Operands(NamedTuple):
    """The tensors of a call, in the caller's orientation."""

    x: torch.Tensor
    z: torch.Tensor
    weights: torch.Tensor
    coefficients: torch.Tensor | None
    scales: torch.Tensor | None = None  # of pairs, as weights are

    def transposed(self, kind: Kind) -> Operands:
        """As (L, Q, K), (L, T, K), (L, Q, T), (L, O, T) and (L, Q, T), without a batch (Q, K) and
        so on."""
        if not kind.plain:
            return self
        return Operands(self.x.mT, self.z.mT, self.weights.mT, self.coefficients)


class Call(NamedTuple):
    """A checked call; ``sets`` is 0 without coefficients."""

    queries: int
    points: int
    features: int
    sets: int
    batch: int
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device

    @property
    def empty(self) -> bool:
        return 0 in self.out_shape


def transposed_out(kind: Kind, out: torch.Tensor, sets: int) -> torch.Tensor:
    """An output as (L, O, Q, K), a view."""
    out = out.mT if kind.plain else out
    if not sets and not kind.plain:
        out = out.unsqueeze(-3)
    return out if out.dim() == 4 else out[None]


def check_call(kind: Kind, operands: Operands, out, accumulate: bool, values: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_tensors(kind, operands, out)
    _check_kind_of_call(kind)
    sizes = _sizes(kind, operands)
    for name in kind.exponents:
        check_number(kind, name, values.get(name), operands.x.device)
    batch, shape = _output(kind, operands, out, values, sizes)
    check_flag("accumulate", accumulate)
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out, and no out is given")
    dtype = operands.x.dtype
    if out is not None:
        check_result(out, shape, operands.x)
        check_memory(out)
    written = dtype if out is None else out.dtype
    return Call(*sizes, batch, shape, dtype, written, operands.x.device)


def check_tensors(kind: Kind, operands: Operands, out) -> None:
    """Raises TypeError for what is no dense tensor, or None where it must not be."""
    named = dict(zip(kind.names, operands, strict=True))
    required = kind.names[: 4 if kind.plain else 3]
    check_dense(required, **named, out=out)
    refuse_distributed(**named)


def _check_kind_of_call(kind: Kind) -> None:
    if kind.operator not in OPERATORS:
        raise ValueError(f"operator must be one of {OPERATORS}, got {shown(kind.operator)}")
    if not isinstance(kind.inner, STAGES):
        names = ", ".join(f"{stage.__name__}()" for stage in STAGES)
        raise TypeError(f"inner must be one of {names}, got {shown(kind.inner)}")


def _sizes(kind: Kind, operands: Operands) -> tuple[int, int, int, int]:
    """Queries, points, features and sets."""
    first = operands.x
    named = [(n, t) for n, t in zip(kind.names, operands, strict=True) if t is not None]
    for name, t in named:
        if t.dim() not in (2, 3):
            raise ValueError(f"{name} must be {_shape(kind, name)}, got shape {tuple(t.shape)}")
        if t.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} must be one of {', '.join(DTYPE_NAMES.values())}, got {t.dtype}"
            )
        if t.dtype != first.dtype:
            lead = kind.names[0]
            raise TypeError(f"{name} must have the dtype of {lead}, {first.dtype}, got {t.dtype}")
        if t.device != first.device:
            lead = kind.names[0]
            raise ValueError(f"{name} must be on the device of {lead}, {first.device}: {t.device}")
    x, z, weights, coefficients, scales = operands.transposed(kind)
    queries, features, points = x.shape[-2], x.shape[-1], z.shape[-2]
    sets = 0 if coefficients is None else coefficients.shape[-2]
    shapes = {
        0: (queries, features),
        1: (points, features),
        2: (queries, points),
        3: (sets, points),
        4: (queries, points),
    }
    for place, t in enumerate((x, z, weights, coefficients, scales)):
        if t is not None and tuple(t.shape[-2:]) != shapes[place]:
            name, seen = kind.names[place], operands[place]
            shape = shapes[place][::-1] if kind.plain and place < 3 else shapes[place]
            raise ValueError(
                f"{name} must be {_shape(kind, name)}, {shape} by the shapes of "
                f"{' and '.join(kind.names[: min(place, 2)])}, got {tuple(seen.shape)}"
            )
    return queries, points, features, sets


def _shape(kind: Kind, name: str) -> str:
    """An operand's shape in errors."""
    letters = {
        "x": "Q, K", "z": "T, K", "weights": "Q, T", "coefficients": "O, T",
        "d": "N, M", "b": "N, K", "a": "K, M", "c": "O, K", "scales": "Q, T",
    }[name]  # fmt: skip
    return f"({letters}) or (L, {letters})"


def check_number(kind: Kind, name: str, value, device: torch.device) -> None:
    """A number that the slope needs. Raises ValueError and TypeError."""
    if value is None:
        raise ValueError(f"inner={kind.inner} needs {name}")
    number = host_value(name, value)
    if number is not None:
        check_host(name, number)
        return
    numbers.check_tensor(name, value, frozenset(), check_host)
    if value.device != device and value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}, the inputs on {device}: move it there")


def check_host(name: str, value: float, positive: frozenset[str] = frozenset()) -> None:
    """Checks of a host value by its name alone. Raises ValueError."""
    if name == "p" and not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"p must be 0 or greater and finite, got {value}")
    numbers.check_host(name, value, positive)


def check_eps(eps) -> float:
    """Raises TypeError unless it is a real number, ValueError below 0."""
    value = None if isinstance(eps, torch.Tensor) else host_value("eps", eps, 0)
    if value is None:
        raise TypeError("eps must be a real number, got a tensor")
    if not value >= 0:
        raise ValueError(f"eps must be 0 or greater, got {eps}")
    return value


def _output(kind: Kind, operands: Operands, out, values: dict, counts) -> tuple:
    """The batch and the output's shape."""
    queries, _, features, sets = counts
    plane = (features, queries) if kind.plain else (queries, features)
    shape = plane if operands.coefficients is None else (sets, *plane)
    named = dict(zip(kind.names, operands, strict=True)).items()
    sizes = {name: t.shape[0] for name, t in named if t is not None and t.dim() == 3}
    for name in kind.exponents:
        value = values.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            sizes[name] = value.shape[0]
    if out is not None and out.dim() == len(shape) + 1:
        sizes["out"] = out.shape[0]
    batch = common_batch(sizes)
    batched = any(t is not None and t.dim() == 3 for t in operands) or batch != 1
    if out is not None:  # whose rank decides for a batch of 1
        batched = batch != 1 or out.dim() == len(shape) + 1
    return batch, (batch, *shape) if batched else shape


def refuse_gradients(kind: Kind, operands: Operands, out, values: dict) -> None:
    """Raises RuntimeError, naming the argument, if one requires a gradient."""
    named = dict(zip(kind.names, operands, strict=True)) | {"out": out, **values}
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, and that of a gradient is not computed here: pass "
                f"{name}.detach(), or call under torch.no_grad()"
            )
