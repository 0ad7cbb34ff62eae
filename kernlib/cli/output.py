"""What the commands share: tables that survive a pipe, readable sizes, errors in one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

PIPE_WIDTH = 1000  # of tables that no terminal shows: a row stays one line, for grep


def print_table(columns: dict[str, str], rows: list[tuple], title: str | None = None) -> None:
    """Print rows under ``columns``, which maps each heading to "left" or "right"."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading, justify in columns.items():
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else PIPE_WIDTH, markup=False, highlight=False).print(table)


def size(count: int) -> str:
    """Bytes for people: ``812 B``, ``61.4 KB``, ``512.0 MB``."""
    if count < 1024:
        return f"{count} B"
    amount, unit = count / 1024, "KB"
    if amount >= 1024:
        amount, unit = amount / 1024, "MB"
    return f"{amount:.1f} {unit}"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what kernlib raises, and a setting that cannot be used, into one message and exit 1."""
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
