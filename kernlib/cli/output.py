"""What the commands print with: tables that survive a pipe, JSON, sizes, errors in one message."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

PIPE_WIDTH = 1000  # of tables that no terminal shows: a row stays one line, for grep
FOLDED_WIDTH = 24  # narrower than this, folding a description makes towers


def print_table(columns: dict[str, str], rows: list[tuple], title: str | None = None) -> None:
    """Print rows under ``columns``, which maps each heading to "left" or "right". The last column
    is folded into what a terminal has left; where that is too little, a row stays one line."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    last = list(columns)[-1]
    for heading, justify in columns.items():
        table.add_column(heading, justify=justify, no_wrap=heading != last, overflow="fold")
    table.columns[-1].min_width = FOLDED_WIDTH if len(columns) > 1 else None
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PIPE_WIDTH, markup=False, highlight=False)
    wide = console.options.update(width=PIPE_WIDTH)
    needed = Measurement.get(console, wide, table)
    if console.width < needed.minimum:
        console.width = needed.maximum
    console.print(table)


def plain(value: object) -> str:
    """The text of a value on one line, with escapes for what a terminal would obey: entries of a
    bundle say what they please."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(facts: object) -> None:
    """The one thing that a command with --json writes to stdout."""
    click.echo(json.dumps(facts, indent=2))


def size(count: int) -> str:
    """Bytes for people: ``812 B``, ``61.4 KB``, ``512.0 MB``, ``1.5 GB``."""
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KB", "MB", "GB"):
        amount /= 1024
        if amount < 1024 or unit == "GB":
            break
    return f"{amount:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``; ``1 entry``, ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what kernlib and the disk raise, and a setting that cannot be used, into one message and
    exit 1."""
    from kernlib import settings
    from kernlib.errors import KernlibError

    try:
        settings.current()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    try:
        yield
    except KernlibError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # click ends quietly when nobody reads on
        raise click.ClickException(_reason(error)) from error


def _reason(error: OSError) -> str:
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"
