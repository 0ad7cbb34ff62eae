"""The faults: a text that stands once in a file, and what takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import tomllib

from tests.support.paths import ROOT

FOLDER = Path(__file__).parent / "faults"


class Mutant(NamedTuple):
    """One fault. ``kind`` is "fixed", a bug that was mended, or "drawn"; ``fault`` is what a user
    would see of it."""

    family: str
    name: str
    file: str
    kind: str
    fault: str
    before: str
    after: str

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}"

    @property
    def on_device(self) -> bool:
        """Whether it is in the text of kernels."""
        return self.file.startswith("kernel_sources/")

    def lines(self, root: Path = ROOT) -> range:
        """The lines of the file that it changes, counted from 1."""
        text = (root / self.file).read_text()
        first = text[: self._place(text)].count("\n") + 1
        return range(first, first + self.before.rstrip("\n").count("\n") + 1)

    def apply(self, root: Path) -> str:
        """Put the fault into the tree at ``root``; the text that was there before it."""
        path = root / self.file
        text = path.read_text()
        place = self._place(text)
        path.write_text(text[:place] + self.after + text[place + len(self.before) :])
        return text

    def _place(self, text: str) -> int:
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.id}: its text stands {count} times in {self.file}, not once")
        return text.index(self.before)


def load(folder: Path = FOLDER) -> list[Mutant]:
    """All faults: the first of each family, then the second of each, and so on, so that the first
    N of them are a sample of all."""
    families = []
    for path in sorted(folder.glob("*.toml")):
        rows = tomllib.loads(path.read_text())["mutant"]
        families.append([Mutant(path.stem, **row) for row in rows])
    order = [(i / len(rows), row) for rows in families for i, row in enumerate(rows)]
    return [row for _, row in sorted(order, key=lambda pair: pair[0])]
