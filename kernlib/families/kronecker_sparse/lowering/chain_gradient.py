"""Gradients of chains of two factors in half precision, batch first, in one plan: from the gradient
of y and from x, with h computed again.

Each launch is one of another module. What lies between them stays in the workspace: h, its
gradient, and behind these whatever a launch has for itself. Where hidden.cuh takes the factors, h
has each l by itself and the gradient of a bias is a sum beside that of the second weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kernlib.families.kronecker_sparse.lowering import (
    deinterleave,
    hidden,
    interleaved_gradient,
)
from kernlib.families.kronecker_sparse.lowering.problem import Pattern, Problem
from kernlib.families.kronecker_sparse.lowering.transpose import ALIGNMENT
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

NAMES = "grad", "x", "weight1", "weight2"
RESULTS = "to_x", "to_weight1", "to_weight2", "to_bias"


class Problems(NamedTuple):
    """What the launches compute."""

    hidden: Problem  # h from x and the first weight
    to_second: Problem  # the gradient of the second weight from that of y and h
    to_hidden: Problem  # that of h from that of y and the second weight
    to_first: Problem  # that of the first weight from that of h and x
    to_x: Problem  # that of x from that of h and the first weight

    @property
    def second(self) -> Pattern:
        """The pattern of the second factor."""
        each = self.to_second
        return each.blocks, each.rows, each.columns, each.lanes


class Needs(NamedTuple):
    """Of which tensors a gradient is asked for."""

    x: bool
    first: bool
    second: bool
    bias: bool


def lower(
    problems: Problems,
    needs: Needs,
    arch: str,
    multiprocessors: int,
    lower_one: Callable[[Problem], Lowered],
) -> tuple[Lowered, bool]:
    """The launches for those of ``needs``, and whether the gradient of the bias is among their
    results. ``lower_one`` chooses the kernels of one problem."""
    itemsize = DTYPES[problems.hidden.dtype].bytes
    features = problems.hidden.blocks * problems.hidden.columns
    natural = round_up(problems.hidden.rows * features * itemsize, ALIGNMENT)
    apart = needs.second and _is_apart(problems, arch)
    of_h = deinterleave.size(problems.to_second) if apart else natural
    h, to_h, rest = 0, round_up(of_h, ALIGNMENT), round_up(of_h, ALIGNMENT) + natural
    steps: list[Step] = []
    scratch = 0

    def add(lowered: Lowered, places: Mapping[str, tuple[str, int]]) -> None:
        nonlocal scratch
        scratch = max(scratch, lowered.workspace)
        steps.extend(
            step.placed({WORKSPACE: (WORKSPACE, rest), **places}) for step in lowered.steps
        )

    biased = apart and needs.bias and problems.second[3] in interleaved_gradient.BIAS_LANES
    if apart:
        layout = deinterleave.layout(problems.to_second)
        step = hidden.step(problems.hidden, problems.second, layout, multiprocessors)
        add(Lowered((step,)), {"h": (WORKSPACE, h)})
        summed = interleaved_gradient.launches(problems.to_second, multiprocessors, biased)
        results = {"out": ("to_weight2", 0), "bias": ("to_bias", 0)}
        add(summed, {"left": ("grad", 0), "h": (WORKSPACE, h), **results})
    elif needs.second:
        names = {"left": ("x", 0), "right": ("weight1", 0), "out": (WORKSPACE, h)}
        add(lower_one(problems.hidden), names)
        names = {"left": ("grad", 0), "right": (WORKSPACE, h), "out": ("to_weight2", 0)}
        add(lower_one(problems.to_second), names)
    if needs.x or needs.first:
        names = {"left": ("grad", 0), "right": ("weight2", 0), "out": (WORKSPACE, to_h)}
        add(lower_one(problems.to_hidden), names)
    if needs.first:
        names = {"left": (WORKSPACE, to_h), "right": ("x", 0), "out": ("to_weight1", 0)}
        add(lower_one(problems.to_first), names)
    if needs.x:
        names = {"left": (WORKSPACE, to_h), "right": ("weight1", 0), "out": ("to_x", 0)}
        add(lower_one(problems.to_x), names)
    return Lowered(tuple(steps), rest + scratch), biased


def _is_apart(problems: Problems, arch: str) -> bool:
    """Whether h has each l by itself."""
    summed = problems.to_second
    return (
        summed.rows >= summed.columns
        and bool(interleaved_gradient.candidates(summed, arch))
        and hidden.takes(problems.hidden, problems.second, arch) is not None
    )


def variants(patterns: tuple[Pattern, Pattern], arch: str, dtypes: list[str]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose besides those of the factors."""
    return hidden.variants(patterns, arch, dtypes)
