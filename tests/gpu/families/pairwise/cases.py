"""Shared by the gpu tests of the pairwise family: references in float64 and error measures."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

import kernlib as kl
from kernlib.families.pairwise import checks
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.kernels.few import Few
from kernlib.families.pairwise.lowering import reduce
from kernlib.families.pairwise.reference import pairwise
from kernlib.runtime import rehearsal
from kernlib.runtime.plan import forget_plans

POISON = float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@contextmanager
def by(kind: str):
    """Calls take the kernel of few pairs wherever it is taken, or "direct" never."""
    estimate = {"few": 0.0, "direct": float("inf")}[kind]
    forget_plans()
    with mock.patch.object(Few, "estimate", lambda *_: estimate):
        yield
    forget_plans()


@contextmanager
def whole_blocks():
    """Reductions of few features have rows of a thread and stages as large problems have."""
    forget_plans()
    with mock.patch.object(reduce.Work, "is_large", lambda work, rows: True):
        yield
    forget_plans()


@contextmanager
def lowered_by(*owners, name: str = "launch"):
    """What the functions of this name of some classes or modules lower meanwhile, for plans that
    are made anew."""
    made = []

    def watched(lower):
        def seen(*arguments):
            lowered = lower(*arguments)
            if rehearsal.current() is None:  # nor for kernels that are compiled early
                made.append(lowered)
            return lowered

        return seen

    forget_plans()
    with ExitStack() as patches:
        for owner in owners:
            lower = watched(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, lower))
        yield made
    forget_plans()


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """``|out - ref| / |ref|`` in the Frobenius norm, computed in float64; NaN never passes."""
    reference = reference.double()
    scale = reference.norm()
    difference = (out.double().to(reference.device) - reference).norm()
    return (difference / scale if scale > 0 else difference).item()


def reference(descriptor, a, b=None, row_offset=0, col_offset=0, **hyperparameters):
    """The float64 result on the CPU, of the same inputs rounded to their own dtype."""
    a, b = (None if x is None else x.detach().cpu().double() for x in (a, b))
    values = {
        name: value.cpu().double() if isinstance(value, torch.Tensor) else value
        for name, value in hyperparameters.items()
    }
    if descriptor.symmetric:
        descriptor, b = descriptor.replace(symmetric=False), a
    call = checks.check_call(descriptor, a, b, None, False, row_offset, col_offset, values)
    first, second = ((x if x.dim() == 3 else x[None]).expand(call.batch, -1, -1) for x in (a, b))
    root, inner = checks.follows_inner(descriptor, values), values.pop("p", None)
    inner = values.pop("inner_p", inner)
    names = ("epsilon", "regularization", "inner_scale", "outer_p")
    given = {name: values.pop(name) for name in names if name in values}
    given |= {"inner_p": inner, "root": root, "diagonal": row_offset - col_offset}
    result = pairwise(descriptor, first, second, parameters=values, **given)
    return result.view(call.out_shape)


def check(descriptor, a, b=None, tolerance=None, **arguments) -> torch.Tensor:
    """Run on the GPU into a poisoned output and compare with the reference."""
    values = {k: v for k, v in arguments.items() if k not in ("out", "accumulate")}
    wanted = reference(descriptor, a, b, **values)
    out = arguments.pop("out", None)
    if out is None:
        out = torch.full(wanted.shape, POISON, dtype=a.dtype, device=a.device)
    inputs = (a,) if b is None else (a, b)
    result = kl.run_kernel(descriptor, *inputs, out=out, **arguments)
    assert result is out
    error = relative_error(out, wanted)
    bound = TOLERANCE[a.dtype] if tolerance is None else tolerance
    assert error <= bound, f"{descriptor.describe()}: error {error:.2e} > {bound:.0e}"
    return out


def points(*shape: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.float64) * scale).to(dtype)


def all_combinations() -> list:
    """The predecessor's 150 combinations."""
    stages = (norms.Identity, norms.Abs, norms.Square, norms.Sqrt, norms.Power)
    epilogues = (None, kl.Laplace(), kl.Gaussian())
    return [
        kl.Pairwise(operator, inner(), outer(), epilogue)
        for operator in ("difference", "dot")
        for inner in stages
        for outer in stages
        for epilogue in epilogues
    ]
