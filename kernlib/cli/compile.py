"""``kernlib compile``: kernels into the cache before anybody calls them."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict

import click

from kernlib.cli import calls, kernels, lookup, places
from kernlib.cli.calls import Call, bad
from kernlib.cli.options import (
    TARGETS,
    Sizes,
    arch_option,
    argument_option,
    dtype_option,
    json_option,
    shape_option,
)
from kernlib.cli.output import counted, plain_errors, print_json, print_table, say

COLUMNS = {"arch": "left", **kernels.REPORTS, "from": "left", "description": "left"}
SPARE = ("shared", "spills", "registers", "cubin")  # columns that a narrow terminal drops
REDUCTIONS = (
    *("kernel_matmul", "kernel_sum", "kernel_logsumexp"),
    *("kernel_min", "kernel_argmin", "kernel_topk"),
)


@click.command("compile")
@click.argument("names", metavar="DESCRIPTOR...", nargs=-1, required=True)
@arch_option(TARGETS)
@dtype_option
@shape_option("only that call's kernels. A letter is a size that --size gives.")
@click.option(
    "--size",
    "sizes",
    type=Sizes(),
    multiple=True,
    metavar="LETTER=SIZE",
    help="What a letter of --shape stands for, such as M=1000, or M=1000..100000 for a range: the "
    "kernels of calls of its ends, of the powers of two between, and of each plus one.",
)
@argument_option
@click.option(
    "--reduction",
    type=click.Choice(REDUCTIONS),
    metavar="FUNCTION",
    help="The call that --shape describes is this function of a kernel matrix that is not stored: "
    f"{', '.join(REDUCTIONS)}.",
)
@click.option(
    "--gradient",
    "gradients",
    multiple=True,
    metavar="NAME",
    help="Operand or argument by which the call is differentiated, such as a or bandwidth: with "
    "the kernels of its backward pass; may be repeated.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads that compile. By default one a core.",
)
@json_option
def compile_kernels(
    names, archs, dtypes, shapes, sizes, arguments, reduction, gradients, workers, as_json
) -> None:
    """Compile kernels into the cache, for GPUs that need not be here.

    DESCRIPTOR is one of kernlib's ready-made descriptors, such as laplace_l1; a descriptor as
    text, such as "KroneckerSparse(a=6, b=64, c=64, d=1, epilogue=(Bias(),))"; or
    package.module:name, where name is a descriptor, a list of them, or a function that returns
    either; modules of the working directory are found. With --shape, the kernels that a call with
    such tensors uses; without, every kernel that any call may use, but of kernel matrices none of
    gradients and reductions. What the cache or a bundle has is not compiled again. Progress goes
    to stderr.

    Exits with 1 if a kernel does not compile or cannot be kept on disk.
    """
    call = calls.described(arguments, shapes, sizes, reduction, gradients)
    with plain_errors():
        # First what needs no torch: a misspelt name should not wait for it.
        descriptors = [descriptor for name in names for descriptor in lookup.descriptors(name)]
        listed = calls.dtypes_of(dtypes)
        places.disk_layers()
        targets = archs or calls.archs_here("Compiling")
        facts = _compile(descriptors, targets, listed, call, workers)
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    lost = facts["compiled"] - facts["kept"]
    if lost:
        message = f"{counted(lost, 'kernel')} could not be kept in {facts['path']}"
        raise click.ClickException(f"{message}; `kernlib doctor` says how full it is")


def _compile(descriptors: list, archs: tuple, dtypes: tuple, call: Call, workers) -> dict:
    """Compile or find them; all that is printed. Raises what kernlib.compile raises for kernels,
    UsageError for what it says of arguments."""
    from kernlib import events

    seen: list = []
    unsubscribe = events.subscribe(seen.append)
    start = time.perf_counter()
    try:
        with calls.plain_refusals(descriptors):
            entries = _entries(descriptors, archs, dtypes, call, workers)
    finally:
        unsubscribe()
    compiled = [event.key for event in seen if event.name == "compile"]
    stored = {event.key for event in seen if event.name == "store"}
    rows = _facts(entries, seen)
    return {
        "archs": list(archs),
        "compiled": len(compiled),
        "found": len(rows) - len(compiled),
        "kept": sum(_is_kept(key) for key in stored.intersection(compiled)),
        "seconds": round(time.perf_counter() - start, 3),
        "path": str(places.folder()),
        "kernels": rows,
    }


def _is_kept(key: str) -> bool:
    """Whether a kernel that was put into the store has not been driven out by later ones."""
    from kernlib.jit import service

    return service.layers().store.get(bytes.fromhex(key)) is not None


def _entries(descriptors: list, archs: tuple, dtypes: tuple, call: Call, workers) -> list:
    """The distinct entries that kernlib.compile answers, in order."""
    import kernlib

    parameters = set(inspect.signature(kernlib.compile).parameters)
    for name in parameters.intersection(call.arguments):
        raise bad(f"{name} is no argument of a call.", "--argument")
    common = {"archs": archs, "workers": workers}
    if not calls.has_shapes(call):
        entries = kernlib.compile(descriptors, dtypes=dtypes, **common)
        return list({id(entry): entry for entry in entries}.values())
    entries = []
    # Which operand a gradient is by depends on the descriptor.
    groups = [[descriptor] for descriptor in descriptors] if call.gradients else [descriptors]
    for dtype in dtypes:
        for group in groups:
            tensors, named = calls.tensors_of(group[0], call, dtype)
            for descriptor in group:
                calls.check_operands(descriptor, call)
            if len(tensors) == 1:
                entries += kernlib.compile(group, specs=tensors[0], **common, **named)
            else:
                entries += _of_range(group, archs, tensors, named, workers)
    return list({id(entry): entry for entry in entries}.values())


def _of_range(descriptors: list, archs: tuple, several: list, named: dict, workers) -> list:
    """The entries of many calls, which take few kernels: so these are listed first."""
    from kernlib.ahead import build_all, specs

    jobs = {
        (spec, arch): None
        for arch in archs
        for descriptor in descriptors
        for tensors in several
        for spec in specs(descriptor, arch, tensors, named)
    }
    return build_all(list(jobs), workers, None)


def _facts(entries: list, seen: list) -> list[dict]:
    """Facts of each entry with its key and where it is from, which the events tell."""
    waiting = defaultdict(list)
    for event in seen:
        if event.name in ("compile", "hit"):
            waiting[event.arch, event.description].append(event)
    rows = []
    for entry in entries:
        facts = kernels.facts(entry)
        queue = waiting[facts["arch"], facts["description"]]
        event = queue.pop(0) if queue else None
        rows.append({"key": event and event.key, **facts, "from": _origin(event)})
    return rows


def _origin(event) -> str:
    if event is None:  # found under another description, which no key holds
        return "store"
    return "compiled" if event.name == "compile" else event.fields["where"]


def _print(facts: dict) -> None:
    rows = [
        (row["arch"], *kernels.reports(row), row["from"], row["description"])
        for row in facts["kernels"]
    ]
    if rows:
        print_table(COLUMNS, rows, spare=SPARE)
    else:
        click.echo("Such a call launches no kernel.")
    say(
        f"{facts['compiled']} compiled, {facts['found']} found, in {facts['seconds']:.1f} s; "
        f"kernels are kept in {facts['path']}"
    )
