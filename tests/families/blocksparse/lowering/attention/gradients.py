"""Gradients of attention of small tensors, by kernels and by their formula in float64."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.kernels.attention.gradient.hopper import HopperGradient
from kernlib.families.blocksparse.kernels.attention.gradient.portable import PortableGradient
from kernlib.families.blocksparse.lowering.attention.problem import AttentionGradient, Collected
from tests.families.blocksparse.lowering.attention.cases import (
    ARCH,
    Case,
    Made,
    error,
    guarded,
    is_intact,
    launches_of,
    operand_of,
    view_of,
)

PORTABLE, HOPPER = PortableGradient(), HopperGradient()
GATES = {"float16": 2e-3, "bfloat16": 1.6e-2}


class Gradients:
    """Of a case whose result is that of the formula, rounded."""

    def __init__(self, case: Case, captured=(), grad_lse: bool = False):
        self.made = made = Made(case, captured)
        self.grad_lse = torch.randn_like(made.lse) if grad_lse else None
        for name in ("q", "k", "v"):
            given = getattr(made, name)
            setattr(self, f"d{name}", guarded(*given.shape, given.dtype))
        self.renew()

    def renew(self) -> None:
        """The result, after a change to what it is of."""
        out, lse = self.made.wanted()
        self.made.out.copy_(out)
        self.made.lse.copy_(lse)

    @property
    def results(self) -> list[torch.Tensor]:
        return [self.dq, self.dk, self.dv]

    def problem(self, needs=(True, True, True), collected=()) -> AttentionGradient:
        given = (operand_of(t) for t in (self.made.grad, *self.results))
        has_lse = self.grad_lse is not None
        return AttentionGradient(self.made.problem(), *given, needs, has_lse, collected)

    def run(self, emulator, choice=None, needs=(True, True, True), **more) -> None:
        """The launches, which write what they need to alone, of the portable kernel or of
        ``kernel``; ``sums`` are what is collected, by the number of a captured tensor and its
        axes, as ``{(0, "row"): tensor}``."""
        sums, kernel = more.get("sums", {}), more.get("kernel", PORTABLE)
        arch = ARCH if kernel is PORTABLE else "sm_90a"
        collected = tuple(Collected(*key, view_of(t)) for key, t in sums.items())
        problem = self.problem(needs, collected)
        assert kernel.takes(problem, arch)
        assert choice is None or choice in kernel.choices(problem, arch)
        for t in self.results:
            t.fill_(7.0)
        written = self.results
        if kernel is not PORTABLE:  # there is no address where nobody needs a result
            written = [t if need else None for t, need in zip(written, needs, strict=True)]
        named = dict(zip(("dq", "dk", "dv"), written, strict=True))
        named |= {f"collected{place}": t for place, t in enumerate(sums.values())}
        if self.grad_lse is not None:
            named["grad_lse"] = self.grad_lse
        self.made.launch(emulator, launches_of(kernel, problem, choice, arch), **named)
        for t, need in zip(self.results, needs, strict=True):
            assert is_intact(t) and (need or t.eq(7.0).all())

    def wanted(self, captured=()) -> tuple[torch.Tensor, ...]:
        """By q, k, v and ``captured``, of the formula."""
        inputs = self.made.doubles()
        out, lse = self.made.dense(*inputs, captured or self.made.captured)
        total = (out * self.made.grad.double()).sum()
        if self.grad_lse is not None:
            total += (lse * self.grad_lse)[lse.isfinite()].sum()
        return torch.autograd.grad(total, [*inputs, *captured], allow_unused=True)

    def check(self) -> None:
        gate = GATES[self.made.case.numbers]
        for found, wanted in zip(self.results, self.wanted(), strict=True):
            wanted = torch.zeros_like(found).double() if wanted is None else wanted
            assert error(found, wanted) <= gate


# What scores.py's soft_bias() reads, and the gradients of it.


def soft_tensors(case: Case, pairs: tuple[int, int] | None = None) -> tuple[torch.Tensor, ...]:
    """Of rows, of columns of each head, and of pairs of these of so many batches and heads, all by
    default."""
    rows, cols = case.queries, case.keys
    return (
        torch.randn(1, 1, rows, 1) * 0.3,
        torch.randn(1, case.heads, 1, cols),
        torch.randn(*(pairs or (case.batch, case.heads)), rows, cols) * 0.5,
    )


def sums_of(case: Case, pairs: tuple[int, int] | None = None) -> dict:
    """Zeros, where kernels leave these gradients."""
    batch, heads, rows, cols = case.batch, case.heads, case.queries, case.keys
    return {
        (0, "row"): torch.zeros(batch, heads, rows, 1),
        (1, "col"): torch.zeros(batch, heads, 1, cols),
        (2, "pair"): torch.zeros(*(pairs or (batch, heads)), rows, cols),
    }


def check_sums(made: Gradients, sums: dict, given: tuple[torch.Tensor, ...]) -> None:
    """What is left there, summed over what a tensor does not have, beside the formula."""
    wanted = made.wanted(tuple(t.double().requires_grad_() for t in given))[3:]
    for (index, _), found in sums.items():
        found = found.sum_to_size(given[index].shape)
        assert error(found, wanted[index]) <= GATES[made.made.case.numbers]
