"""``kernlib convert``: a checkpoint with compressed layers from one that people have."""

from __future__ import annotations

from pathlib import Path

import click

from kernlib.cli.options import json_option
from kernlib.cli.output import counted, plain_errors, print_json, print_table, say, size

COLUMNS = {
    "shape": "right",
    "density": "right",
    "format": "left",
    "dense": "right",
    "compressed": "right",
    "us": "right",
    "layer": "left",
}
SPARE = ("dense", "us", "shape")  # columns that a narrow terminal drops


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), required=False)
@click.option(
    "--density",
    type=float,
    metavar="D",
    help="Prune each layer to this part of its "
    "entries first, those of largest magnitude. By default weights stay as they are.",
)
@click.option(
    "--per",
    type=click.Choice(["matrix", "row"]),
    default="matrix",
    show_default=True,
    help="Over what --density counts.",
)
@click.option(
    "--format",
    "format",
    default="auto",
    show_default=True,
    metavar="FORMAT",
    help="Of compressed layers: auto, bitmap, u8, u4, u2, macko.",
)
@click.option(
    "--columns",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="For auto: vectors, such as sequences, that products mostly have at a time.",
)
@click.option(
    "--values",
    type=click.Choice(["int8", "fp8", "int4"]),
    help="Values in fewer bits. By default they keep theirs.",
)
@click.option(
    "--match",
    metavar="REGEX",
    help="Which layers: those in whose names this is found. By default all but the head.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="DEVICE",
    help="Where weights are compressed, such as cuda.",
)
@click.option(
    "--fuse/--no-fuse",
    default=True,
    show_default=True,
    help="Whether layers that read the same input become one product when they are loaded.",
)
@click.option(
    "--to-dense",
    is_flag=True,
    help="The other way: a dense checkpoint of a converted one, or of masks and bitmasks.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Write nothing: print a table of what would be done, by some rows of each layer.",
)
@json_option
def convert(checkpoint, out, to_dense, dry_run, as_json, device, **options) -> None:
    """Compress the linear layers of a pruned checkpoint.

    CHECKPOINT is a folder as transformers writes it, or one file of safetensors or torch.save: with
    weights that have zeros, with masks of torch.nn.utils.prune, or with bitmasks of
    compressed-tensors. OUT is the folder of the result, which from_pretrained loads once kernlib is
    imported. An interrupted conversion goes on where it was when it is repeated. Progress goes to
    stderr.

    Exits with 1 if a file is missing, damaged, quantised or of another format.
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing argument 'OUT': the folder of the result, or --dry-run.")
    if to_dense and (dry_run or _changed({**options, "device": device})):
        raise click.UsageError("--to-dense goes with --json alone: it lays out what there is.")
    from kernlib import checkpoints

    with plain_errors(), _plain_refusals():
        if to_dense:
            checkpoints.to_dense(checkpoint, out)
            say(f"A dense checkpoint is in {out}.", err=as_json)
            return
        if dry_run:
            layers = checkpoints.plan(checkpoint, **{n: options[n] for n in options if n != "fuse"})
        else:
            layers = checkpoints.convert(checkpoint, out, device=device, **options)
    if as_json:
        print_json(_facts(layers))
        return
    _print(layers, dry_run)
    if not dry_run:
        say(f"It is in {out}.")


def _changed(options: dict) -> list[str]:
    """Options that are not what they are by default."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    return [name for name in options if context.get_parameter_source(name) is not default]


class _plain_refusals:
    """Refused arguments and checkpoints, and missing libraries, as one message and exit 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, _) -> None:
        if isinstance(error, (ValueError, TypeError, FileExistsError, ImportError)):
            raise click.ClickException(str(error)) from error


def _facts(layers: list) -> dict:
    """What --json prints."""
    rows = [
        {**layer._asdict(), "dtype": str(layer.dtype).removeprefix("torch.")} for layer in layers
    ]
    totals = {name: sum(row[name] for row in rows) for name in ("dense_bytes", "nbytes")}
    times = {name: round(sum(row[name] for row in rows), 3) for name in ("dense_us", "us")}
    return {**totals, **times, "layers": rows}


def _print(layers: list, is_plan: bool) -> None:
    rows = [
        (
            f"{layer.shape[0]} x {layer.shape[1]}",
            f"{layer.density:.3f}",
            layer.format,
            size(layer.dense_bytes),
            size(layer.nbytes),
            f"{layer.us:.1f}",
            layer.name,
        )
        for layer in layers
    ]
    if rows:
        print_table(COLUMNS, rows, spare=SPARE)
    facts = _facts(layers)
    would = "would be" if is_plan else "are"
    say(
        f"{counted(len(layers), 'layer')} {would} compressed from {size(facts['dense_bytes'])} to "
        f"{size(facts['nbytes'])}. On an H200 their products with one vector take about "
        f"{facts['us'] / 1e3:.2f} ms a token, dense {facts['dense_us'] / 1e3:.2f} ms."
    )
