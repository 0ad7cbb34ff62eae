"""``kernlib show``: the CUDA source or the machine code of kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from kernlib.cli import calls, lookup, places
from kernlib.cli.options import (
    TARGETS,
    arch_option,
    argument_option,
    dtype_option,
    json_option,
    shape_option,
)
from kernlib.cli.output import counted, plain, plain_errors, print_json

DISASSEMBLER = "nvdisasm"


@click.command()
@click.argument("name", metavar="DESCRIPTOR")
@click.option("--source", is_flag=True, help="The CUDA source that NVRTC is given.")
@click.option("--sass", is_flag=True, help="The machine code, as nvdisasm prints it.")
@arch_option(TARGETS)
@dtype_option
@shape_option("only that call's kernels.")
@argument_option
@json_option
def show(name, source, sass, archs, dtypes, shapes, arguments, as_json) -> None:
    """Print the CUDA source or the SASS of kernels.

    DESCRIPTOR is named as for `kernlib compile`. With --shape, the kernels that a call with such
    tensors uses on any GPU of each target; without, every kernel that any call may use. --source
    compiles nothing. For --sass, what the cache or a bundle lacks is compiled first.

    Exits with 1 if a kernel does not compile, or --sass finds no nvdisasm.
    """
    if source == sass:
        raise click.UsageError("what is shown is one of --source and --sass.")
    call = calls.one_described(arguments, shapes)
    with plain_errors():
        # First what needs no torch: a misspelt name should not wait for it.
        descriptors = lookup.descriptors(name)
        disassembler = _disassembler() if sass else ""
        listed = calls.dtypes_of(dtypes)
        targets = archs or calls.archs_here("Listing kernels")
        with calls.plain_refusals(descriptors):
            jobs = {
                (spec, arch): None
                for descriptor in descriptors
                for arch in targets
                for spec in calls.specs_of(descriptor, arch, listed, call)
            }
        if not calls.has_shapes(call):
            number = counted(len(jobs), "kernel")
            click.echo(f"Without --shape: {number}, all that any call may use.", err=True)
        texts = _machine_codes(list(jobs), disassembler) if sass else map(_source, jobs)
        if as_json:
            shown = zip(jobs, texts, strict=True)
            print_json([_facts(*job, "sass" if sass else "source", text) for job, text in shown])
            return
        for job, text in zip(jobs, texts, strict=True):
            click.echo(_heading(*job))
            click.echo(text)
    if not jobs:
        click.echo("Such a call launches no kernel.", err=True)


def _heading(spec, arch: str) -> str:
    """Comments ahead of a kernel's text."""
    options = f", ptxas {' '.join(spec.options)}" if spec.options else ""
    launch = f"{spec.entry}: {spec.threads} threads, {spec.shared_bytes} B of dynamic shared memory"
    return f"// {arch} {plain(spec.description)}\n// {launch}{options}"


def _facts(spec, arch: str, kind: str, text: str) -> dict:
    from kernlib.jit import service

    return {
        "key": service.digest(spec, arch).hex(),
        "kernel": spec.entry,
        "arch": arch,
        "description": spec.description,
        "threads": spec.threads,
        "dynamic_shared_bytes": spec.shared_bytes,
        "ptxas_options": list(spec.options),
        "generated": spec.source,
        kind: text,
    }


def _source(job: tuple) -> str:
    """All that NVRTC is given of a kernel: generated text, and the files that it includes."""
    from kernlib.jit import sources

    spec, _ = job
    return sources.assemble(spec.source, f"kernlib_{spec.family}.cu")


def _machine_codes(jobs: list[tuple], disassembler: str) -> Iterator[str]:
    """The SASS of each kernel, in order. Raises ClickException for a cubin that the disassembler
    does not read."""
    from kernlib.ahead import build_all

    places.layers()
    entries = build_all(jobs, None, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        for entry in entries:
            path.write_bytes(entry.cubin)
            done = subprocess.run([disassembler, "-c", path], capture_output=True, text=True)
            if done.returncode:
                reason = plain((done.stderr.strip().splitlines() or ["no reason"])[-1])
                raise click.ClickException(
                    f"{disassembler} does not read a cubin of NVRTC {entry.meta.get('nvrtc', '?')} "
                    f"({reason}); {_advice()}"
                )
            yield done.stdout.rstrip()


def _disassembler() -> str:
    """The path of nvdisasm: of PATH, of NVIDIA's wheels, or of triton's, which is older than
    these. Raises ClickException, which says what to install."""
    candidates = [shutil.which(DISASSEMBLER), *_in_wheels()]
    usable = (str(path) for path in candidates if path and os.access(path, os.X_OK))
    path = next(usable, None)
    if path is None:
        raise click.ClickException(f"{DISASSEMBLER} is neither in PATH nor in a wheel; {_advice()}")
    return path


def _in_wheels() -> Iterator[Path]:
    from importlib.util import find_spec

    for package, pattern in (
        ("nvidia", f"**/bin/{DISASSEMBLER}"),
        ("triton", f"backends/nvidia/bin/{DISASSEMBLER}"),
    ):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted(Path(folder).glob(pattern), reverse=True)


def _advice() -> str:
    return "`pip install nvidia-cuda-nvdisasm` installs a recent one"
