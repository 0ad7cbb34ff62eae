"""Pages of behaviour: tables under the card, driver and versions that they were measured with."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.harness import machine

FOLDER = Path(__file__).parents[2] / "docs" / "results" / "behaviour"


class Table(NamedTuple):
    """Rows under the names of their columns, and before them what was measured, how, and what
    follows from it, in plain sentences."""

    heading: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def lines(self) -> list[str]:
        """In Markdown."""
        head = [_row(self.columns), _row(["---"] * len(self.columns))]
        return [f"## {self.heading}", "", self.text, "", *head, *map(_row, self.rows), ""]


def write(name: str, title: str, tables: Sequence[Table], folder: Path = FOLDER) -> Path:
    """Write the page of a module, and answer its path."""
    on = machine()
    head = (
        f"On {on['gpu']}, driver {on['driver']}, torch {on['torch']}, NVRTC {on['nvrtc']}, "
        f"{on['date']}. Made by `python -m benchmarks.behaviour {name}`."
    )
    wrapped = textwrap.fill(head, 100, break_long_words=False, break_on_hyphens=False)
    lines = [f"# Behaviour: {title}", "", wrapped, ""]
    for table in tables:
        lines += table.lines()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
