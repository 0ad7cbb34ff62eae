"""Why a kernel is chosen, as its class says; the other candidates of a call; and times that
lowering estimates."""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from functools import cache
from importlib import import_module

from kernlib.lowering import kernel


def file_of(spec) -> str:
    """The file that a kernel is made of, the last that its generated text includes."""
    files = re.findall(r'#include "([^"]+/[^"]+)\.cuh"', spec.source)
    return files[-1] if files else f"{spec.family}/{spec.entry}"


def name_of(spec) -> str:
    """Its file without the family: ``split`` of ``pairwise/split/split``, ``split/pack``."""
    *folders, stem = file_of(spec).split("/")[1:]
    return stem if folders[-1:] in ([], [stem]) else f"{folders[-1]}/{stem}"


def reasons(specs) -> dict[str, str]:
    """A sentence for each kernel that is told apart by its name."""
    return {name_of(spec): _reason_of(spec) for spec in specs}


def _reason_of(spec) -> str:
    return _by_file(spec.family).get(f"{file_of(spec)}.cuh", kernel.Kernel.reason)


@cache
def _by_file(family: str) -> dict[str, str]:
    """The reasons of a family's kernels, by their headers."""
    first = f"kernlib.families.{family}.kernels"
    modules = pkgutil.walk_packages(import_module(first).__path__, f"{first}.")
    packages = [first, *(module.name for module in modules if module.ispkg)]
    kinds = [kind for package in packages for kind in kernel.classes(package)]
    return {kind.header: kind.reason for kind in kinds if "reason" in vars(kind)}


def alternatives(descriptor, arch: str, tensors: tuple, arguments: dict) -> dict[str, int]:
    """How many variants of each kind of kernel tuning could try for a call; empty where there is
    nothing to choose, and for chains, which are tuned a factor at a time."""
    from kernlib import ahead
    from kernlib.runtime import tuned

    if descriptor.package == "chain":
        return {}
    with tuned.trying(tuned.Trial(None)) as trial:
        ahead.specs(descriptor, arch, tensors, arguments)
    return dict(Counter(str(choice.get("kind", "direct")) for choice in trial.candidates))


def is_by_torch(descriptor, tensors: tuple, arguments: dict) -> bool:
    """Whether torch computes a call, or one of its factors, on the GPUs of the current
    rehearsal."""
    from kernlib.run import operation_of
    from kernlib.runtime.operation import REFERENCE

    for planned in operation_of(descriptor).planned(descriptor, tensors, arguments):
        call = planned.operation.check(*planned.request)
        if planned.operation.way(call, *planned.request) == REFERENCE:
            return True
        plan = planned.operation.plan(call, *planned.fused)
        if getattr(plan, "compute", None) is not None:
            return True
    return False


def estimates(descriptor, arch: str, tensors: tuple, arguments: dict) -> dict[str, float]:
    """Microseconds on an H100 that lowering estimates for the kinds of kernel of a call and chooses
    by: of a Kronecker-sparse factor batch first with d > 1, on sm_90a. Empty for other calls, which
    have a rule."""
    if type(descriptor).__name__ != "KroneckerSparse":
        return {}
    from kernlib.families.kronecker_sparse import operation, plans
    from kernlib.families.kronecker_sparse.kernels.factor import portable
    from kernlib.families.kronecker_sparse.kernels.lanes import interleaved, via_batch_last
    from kernlib.families.kronecker_sparse.lowering import choose, times
    from kernlib.runtime import ahead, devices
    from kernlib.runtime.operation import REFERENCE

    of = {
        "interleaved": interleaved.microseconds,
        "transposed": via_batch_last.microseconds,
        "portable": portable.microseconds,
    }
    with ahead.unseen(), devices.rehearse(arch):
        (planned, *_) = operation.planned(descriptor, tensors, arguments)
        call = planned.operation.check(*planned.request)
        factor, (x, weight), out, _ = planned.fused
        if not call.batch or planned.operation.way(call, *planned.request) == REFERENCE:
            return {}
        problem, *_ = plans.problem_of(factor, call, x, weight, out)
        listed = choose.candidates(problem, arch)
        if not times.knows(problem) or {choice["kind"] for choice in listed} == {"portable"}:
            return {}
        kinds = [(choice["kind"], choice) for choice in listed if choice["kind"] in of]
        estimated = [(kind, of[kind](problem, choice)) for kind, choice in kinds]
    return {kind: min(t for name, t in estimated if name == kind) for kind in dict(estimated)}
