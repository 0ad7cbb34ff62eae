"""``kernlib explain``: what a call computes, by which kernels and why, and what these cost."""

from __future__ import annotations

import math
from typing import NamedTuple

import click

from kernlib import progress
from kernlib.cli import calls, kernels, lookup, machine, places
from kernlib.cli.options import (
    TARGETS,
    arch_option,
    argument_option,
    dtype_option,
    json_option,
    shape_option,
)
from kernlib.cli.output import counted, plain_errors, print_json, print_table, say, size

COLUMNS = {
    "kernel": "left",
    **kernels.REPORTS,
    "threads": "right",
    "blocks/SM": "right",
    "description": "left",
}
SPARE = ("cubin", "threads", "shared", "compile ms", "blocks/SM", "spills")
INDENT = 12  # columns of the names of lines


class Target(NamedTuple):
    """The GPUs that are meant: one of this machine, or all of an arch."""

    arch: str
    gpu: machine.Gpu | None = None


class Place(NamedTuple):
    """The GPUs of a target that take the same kernels, by their fewest and most multiprocessors,
    and the kernels. ``by_torch`` is whether torch computes the call there."""

    fewest: int
    most: int
    specs: tuple
    by_torch: bool = False


@click.command()
@click.argument("name", metavar="DESCRIPTOR")
@arch_option(TARGETS)
@dtype_option
@shape_option("the call that is explained.")
@argument_option
@json_option
def explain(name, archs, dtypes, shapes, arguments, as_json) -> None:
    """Say what a call computes, by which kernels, and why.

    DESCRIPTOR is named as for `kernlib compile`. With --shape: the formula, the arguments, bytes
    and operations that a call takes at least, and the kernels that it chooses on the GPUs of each
    target, which differ with the number of their multiprocessors. Without: every kernel that any
    call may use. Of each kernel its registers, spills, shared memory, and how many of its blocks a
    multiprocessor holds. What the cache or a bundle lacks is compiled first.

    Exits with 1 if a kernel does not compile.
    """
    call = calls.one_described(arguments, shapes)
    with plain_errors():
        # First what needs no torch: a misspelt name should not wait for it.
        descriptors = lookup.descriptors(name)
        listed = calls.dtypes_of(dtypes)
        places.layers()
        targets = [Target(arch) for arch in archs] or _targets_here()
        with calls.plain_refusals(descriptors):
            facts = [
                _facts(descriptor, several, targets, call)
                for descriptor in descriptors
                for several in (zip(listed) if calls.has_shapes(call) else [listed])
            ]
    if as_json:
        print_json(facts)
        return
    for number, entry in enumerate(facts):
        click.echo("\n" * bool(number), nl=False)
        _print(entry)


def _targets_here() -> list[Target]:
    calls.archs_here("Explaining")
    usable = {(gpu.name, gpu.arch): gpu for gpu in machine.gpus() if gpu.arch is not None}
    return [Target(gpu.arch, gpu) for gpu in usable.values()] or [Target(machine.ARCH_WITHOUT_GPU)]


# What there is to say.


def _facts(descriptor, dtypes: tuple, targets: list[Target], call: calls.Call) -> dict:
    """All that is printed of a descriptor, for one dtype or, without a call, for several."""
    from kernlib.cli.formulas import formula

    tensors, arguments = (), {}
    if calls.has_shapes(call):
        (tensors,), arguments = calls.tensors_of(descriptor, call, dtypes[0])
        calls.check_operands(descriptor, call)
    groups = [_places(descriptor, target, dtypes, call, tensors, arguments) for target in targets]
    return {
        "descriptor": descriptor.describe(),
        "formula": formula(descriptor),
        "call": descriptor.call,
        "dtypes": [_word(dtype) for dtype in dtypes],
        **(_costs(descriptor, tensors, arguments) if tensors else {}),
        "targets": [
            _target(descriptor, target, several, tensors, arguments)
            for target, several in zip(targets, groups, strict=True)
        ],
    }


def _costs(descriptor, tensors: tuple, arguments: dict) -> dict:
    """Arguments and result of a call, the bytes of both, and the operations that the family's
    formula counts, None where it has none."""
    from torch.utils.flop_counter import FlopCounterMode

    import kernlib

    with FlopCounterMode(display=False) as counter:
        result = kernlib.run_kernel(descriptor, *tensors, **arguments)
    named = dict(zip(descriptor.operands, tensors, strict=True)) | arguments
    read = sum(_bytes(value) for name, value in named.items() if name != "out")
    return {
        "arguments": {name: _argument(value) for name, value in named.items()},
        "result": _argument(result),
        "bytes": {"arguments": read, "result": _bytes(result)},
        "operations": counter.get_total_flops() if counter.get_flop_counts()["Global"] else None,
    }


def _argument(value) -> dict:
    if hasattr(value, "dtype"):
        return {"dtype": _word(value.dtype), "shape": list(value.shape)}
    infinite = isinstance(value, float) and not math.isfinite(value)
    return {"value": str(value) if infinite else value}  # JSON has no word for these


def _bytes(value) -> int:
    return value.numel() * value.element_size() if hasattr(value, "dtype") else 0


def _word(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _places(descriptor, target: Target, dtypes, call, tensors, arguments) -> list[Place]:
    """The kernels of a call by the GPUs that take them, or all kernels without a call."""
    from kernlib.jit.targets import MULTIPROCESSORS

    fewest, most = MULTIPROCESSORS[target.arch]
    specs = tuple(calls.specs_of(descriptor, target.arch, dtypes, call))
    if not tensors:
        return [Place(fewest, most, specs)]
    if target.gpu is not None:
        from kernlib.runtime.devices import real_model

        fewest = most = real_model(target.gpu.index).multiprocessors
    places_of = []
    for count in range(fewest, most + 1):
        place = _place(descriptor, target, count, tensors, arguments)
        if places_of and places_of[-1][2:] == place[2:]:
            place = place._replace(fewest=places_of.pop().fewest)
        places_of.append(place)
    return places_of


def _place(descriptor, target: Target, count: int, tensors: tuple, arguments: dict) -> Place:
    """The kernels of a call on a GPU of so many multiprocessors."""
    from kernlib.cli.reasons import is_by_torch
    from kernlib.run import run_of
    from kernlib.runtime import ahead, rehearsal

    rehearsed = rehearsal.Rehearsal(target.arch, target.gpu and target.gpu.index, (count,))
    with ahead.unseen(), rehearsal.entered(rehearsed):
        run_of(descriptor)(descriptor, *tensors, **arguments)
        specs = tuple(rehearsed.specs)
        by_torch = is_by_torch(descriptor, tensors, arguments)
    return Place(count, count, specs, by_torch)


def _target(descriptor, target: Target, several: list[Place], tensors, arguments) -> dict:
    from kernlib.ahead import build_all
    from kernlib.cli import reasons

    specs = list(dict.fromkeys(spec for place in several for spec in place.specs))
    entries = build_all([(spec, target.arch) for spec in specs], None, None)
    rows = {spec: _row(spec, e, target.arch) for spec, e in zip(specs, entries, strict=True)}
    request = (descriptor, target.arch, tensors, arguments)
    with progress.busy("listing what else could compute it"):
        candidates = reasons.alternatives(*request) if tensors else {}
    return {
        "arch": target.arch,
        "gpu": target.gpu and target.gpu.name,
        "places": [
            {
                "multiprocessors": [place.fewest, place.most],
                "by_torch": place.by_torch,
                "kernels": [rows[spec] for spec in place.specs],
            }
            for place in several
        ],
        "reasons": reasons.reasons(specs),
        "candidates": candidates,
        "estimates_us": reasons.estimates(*request) if tensors else {},
    }


def _row(spec, entry, arch: str) -> dict:
    from kernlib.cli import reasons
    from kernlib.jit import service
    from kernlib.jit.targets import resident_blocks

    facts = kernels.facts(entry)
    registers, shared = facts["registers"], facts["shared_bytes"]
    is_counted = registers and shared is not None
    return {
        "key": service.digest(spec, arch).hex(),
        **facts,
        "description": spec.description,
        "source": f"kernel_sources/{reasons.file_of(spec)}.cuh",
        "name": reasons.name_of(spec),
        "threads": spec.threads,
        "blocks": resident_blocks(arch, spec.threads, registers, shared) if is_counted else None,
    }


# How it is said.


def _print(facts: dict) -> None:
    click.echo(facts["descriptor"])
    _say("formula", facts["formula"])
    _say("call", [facts["call"]])
    if "arguments" in facts:
        named = [f"{name} {_text(value)}" for name, value in facts["arguments"].items()]
        _say("arguments", [", ".join(named)])
        _say("result", [_text(facts["result"])])
        _say("at least", [_floor(facts)])
    else:
        listed = ", ".join(facts["dtypes"])
        text = f"every kernel that any call of {listed} may use; --shape asks for those of one call"
        _say("without", [text])
    for target in facts["targets"]:
        for place in target["places"]:
            click.echo()
            _print_place(target, place)
        _print_reasons(target)


def _say(name: str, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        say(line, start=f"{'' if number else name:{INDENT}s}", hang=" " * INDENT)


def _text(value: dict) -> str:
    """``float32 1000x64``, or a number."""
    if "value" in value:
        return str(value["value"])
    return f"{value['dtype']} {'x'.join(map(str, value['shape'])) or '()'}"


def _floor(facts: dict) -> str:
    read, written = facts["bytes"]["arguments"], facts["bytes"]["result"]
    text = f"{size(read + written)}, of arguments {size(read)} and of the result {size(written)}"
    operations = facts["operations"]
    if operations is None:
        return text
    share = f", {operations / (read + written):.3g} a byte" if operations else ""
    return f"{text}; {operations:,} operations{share}"


def _print_place(target: dict, place: dict) -> None:
    fewest, most = place["multiprocessors"]
    count = str(most) if fewest == most else f"{fewest} to {most}"
    who = f"{target['gpu']}, {target['arch']}" if target["gpu"] else target["arch"]
    click.echo(f"{who}, {count} multiprocessors")
    rows = [
        (
            row["name"],
            *kernels.reports(row),
            row["threads"],
            kernels.unknown(row["blocks"]),
            row["description"],
        )
        for row in place["kernels"]
    ]
    if place["by_torch"]:
        who = "it, or a factor of it" if rows else "it"
        more = (
            " Kernels are those of other factors, or of a CUDA graph that captures the call "
            "unprepared."
        )
        why = "that is estimated to be faster, or no kernel takes it"
        say(f"Torch computes {who}: {why}.{more * bool(rows)}")
    if rows:
        print_table(COLUMNS, rows, spare=SPARE)
    elif not place["by_torch"]:
        click.echo("Such a call launches no kernel.")


def _print_reasons(target: dict) -> None:
    for name, sentence in target["reasons"].items():
        say(f"{name}: {sentence}.", hang="  ")
    if target["estimates_us"]:
        times = sorted(target["estimates_us"].items(), key=lambda pair: pair[1])
        listed = ", ".join(f"{kind} {machine.milliseconds(time)}" for kind, time in times)
        say(f"Estimated microseconds on an H100: {listed}.", hang="  ")
    if sum(target["candidates"].values()) > 1:
        listed = ", ".join(f"{kind} ({n})" for kind, n in target["candidates"].items())
        many = counted(sum(target["candidates"].values()), "candidate")
        say(f"`kernlib.tune` chooses among {many}: {listed}.", hang="  ")
