"""The pages of ``docs/gallery``, from the scripts and the committed results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.harness import number, read
from benchmarks.gallery.scripts import ROOT, SHARED, Script
from benchmarks.report.tables import line, short, table

HOME = ROOT / "docs" / "gallery"
RESULTS = ROOT / "benchmarks" / "results"
# Below the folder of a GPU, or cpu. Files beside those of the families would count as a family.
FILE = Path("gallery", "gallery.json")
CPU = "cpu"
ON_A_CPU = "On a CPU torch computes everything: those times say nothing of the kernels."
ONE_THREAD = """\
On a CPU that others use too, put `OMP_NUM_THREADS=1` in front: threads of OpenMP wait for each
other there."""
WIDTH = 280  # pixels of a picture in the overview
OVERVIEW = """\
# Gallery

Each page shows one use of kernlib: a picture, the times of kernlib's way and of the plain way, and
a script of about a hundred lines, in which "Your own data" says what to change. The scripts are in
`examples/gallery`; with a checkout and matplotlib,
`python examples/gallery/kernel_pca.py --plot picture.svg` runs one. Pages and pictures are made by
`python -m benchmarks.gallery`.
"""

Results = list[tuple[str, dict]]  # the folder of a GPU, or cpu, and its results


def load(folder: Path = RESULTS) -> Results:
    """All results, those on a CPU first."""
    paths = sorted(folder.glob(f"*/{FILE.as_posix()}"), key=lambda p: (CPU not in p.parts, p))
    return [(path.relative_to(folder).parts[0], read(path) or {}) for path in paths]


def row_of(script: Script, results: dict) -> dict | None:
    """The row of a script, whose case begins with its name."""
    rows = (row for row in results["rows"] if row["case"].split()[0] == script.name)
    return next(rows, None)


def page(script: Script, results: Results) -> str:
    path = f"examples/gallery/{script.name}.py"
    parts = [f"# {script.title}"]
    if not " ".join(script.text.split()).startswith(script.summary):
        parts.append(script.summary)
    parts += [
        script.text,
        f"![{script.title}]({script.name}.svg)",
        "## Times",
        *_times(script, results),
        "## Run it",
        f"```bash\npython {path}\n```",
        ONE_THREAD,
        "## The script",
        f"`{path}`; what it imports from `harness`\nis in `examples/gallery/{SHARED}`.",
        f"```py\n{script.code.rstrip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def overview(scripts: Sequence[Script]) -> str:
    """The index: a picture and a sentence each."""
    lines = [
        line((_picture(each), f"[{each.title}]({each.name}.md): {each.summary}"))
        for each in scripts
    ]
    return OVERVIEW + "\n" + table(("", ""), "|---|---|", lines) + "\n"


def pages(scripts: Sequence[Script], results: Results, home: Path = HOME) -> dict[Path, str]:
    """Every page by its path."""
    texts = {home / f"{script.name}.md": page(script, results) for script in scripts}
    return {home / "index.md": overview(scripts), **texts}


def _picture(script: Script) -> str:
    image = f'<img src="{script.name}.svg" width="{WIDTH}" alt="{script.title}">'
    return f"[{image}]({script.name}.md)"


def _times(script: Script, results: Results) -> list[str]:
    """A table with a column for each machine, and what the machines are."""
    columns = [(place, head, row_of(script, head)) for place, head in results]
    columns = [(place, head, row) for place, head, row in columns if row is not None]
    if not columns:
        return ["No times are committed yet."]
    ways = list(dict.fromkeys(way for _, _, row in columns for way in row["rivals"]))
    heads = [_machine(place, head) for place, head, _ in columns]
    lines = [line(("sizes", *(_sizes(row["case"]) for _, _, row in columns)))]
    lines.append(line(("kernlib", *(_ms(row["ours"]) for _, _, row in columns))))
    for way in ways:
        cells = [_beside(row["rivals"].get(way), row["ours"]) for _, _, row in columns]
        lines.append(line((way, *cells)))
    errors = ["" if row["error"] is None else f"{row['error']:.1e}" for _, _, row in columns]
    lines.append(line(("error", *errors)))
    said = [f"{_machine(*each[:2])} is {_what(each[1])}." for each in columns]
    if any(place == CPU for place, _, _ in columns):
        said.append(ON_A_CPU)
    return [table(("", *heads), "|---|" + "---:|" * len(heads), lines), "\n".join(said)]


def _machine(place: str, head: dict) -> str:
    return "CPU" if place == CPU else short(head["gpu"])


def _what(head: dict) -> str:
    return f"{head['gpu']} with torch {head['torch']}, {head['date']}"


def _sizes(case: str) -> str:
    """n = 9, k = 3 of name n=9 k=3."""
    return ", ".join(case.split()[1:]).replace("=", " = ")


def _ms(value: float) -> str:
    return f"{number(value)} ms"


def _beside(value: float | None, ours: float) -> str:
    return "" if value is None else f"{_ms(value)} ({number(value / ours, 2)}×)"
