"""README's results and the pages of docs/results, from the committed result files; no number in
them is written by hand.

``python -m benchmarks.report`` writes them, ``--check`` exits 1 where something is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common.harness import PORTABLE
from benchmarks.report import tables, verdict

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = "No results committed yet."
INTRODUCTION = """\
Times in the same process as the rivals', by the benchmark that stands in the name of this page;
(n×) is how many times longer a rival takes. The floor is the time that the bound in brackets takes
at full rate; errors are relative, in the Frobenius norm, against float64. Made by
`python -m benchmarks.report` from `benchmarks/results`.
"""
OF_PORTABLE = """\
Cases that end in "portable" ran the kernels for other GPUs on this one, and do not count where a
rival is faster.
"""
NOTES = {
    "kronecker_product": """\
`strided` is one product by cuBLAS for each factor. `merged to 64` is the same after neighbouring
factors are replaced by their Kronecker product, as far as that has at most 64 rows and columns.
""",
    "pairwise": """\
Reductions have more rivals on the H100 than on the H200, where torch alone was timed. `addmm` is
torch by hand: blocks of rows of one matrix product, exponentials in place, and a product or
`topk` of them; gradients by formulas, without autograd. `torch.compile` is the same compiled or,
for up to 8 features and for absolute differences, fused sums. `keops` is KeOps' LazyTensor, and
`keops products` the same by norms and scalar products; both include the host's work, as no CUDA
graph can hold them.
""",
    "programs": """\
Microseconds are the host's, of a step (forward and backward, with a gradient given) or of a call
without gradients ("hot"); milliseconds are the GPU's from a step's begin to the next one's. Rivals
are not always the same function: `linear` is a dense layer of as many features, `dense` the dense
MLP, `mm` a product of 256 x 256 matrices; `torch`, `sdpa` and `gpytorch` compute the same. `add_`,
which tells how fast the host is, and `given`, kernlib's step with a gradient given, count as none.
""",
    "sparse": """\
MACKO's format is multiplied by kernlib's own kernel, and counts as no rival.
""",
}


class MissingMarkers(Exception):
    """The README has no place for the table."""


def load(folder: Path, gpu: str = "*") -> list[tuple[str, dict]]:
    """(family, results) of every file below ``folder``, in order of path; or of one GPU's."""
    paths = sorted(folder.glob(f"{gpu}/*.json"))
    return [(path.stem, json.loads(path.read_text())) for path in paths]


def page(family: str, found: list[dict], pictures: list[str]) -> str:
    """A family's page: each GPU's tables, and in which cases a rival is faster."""
    parts = [f"# Results: {tables.title(family).lower()}", INTRODUCTION.rstrip()]
    if any(row["case"].endswith(PORTABLE) for results in found for row in results["rows"]):
        parts.append(OF_PORTABLE.rstrip())
    if family in NOTES:
        parts.append(NOTES[family].rstrip())
    parts += [f"![{tables.title(family)}]({path})" for path in pictures]
    for results in found:
        parts += [f"## {verdict.heading(results['gpu'])}"]
        parts += [verdict.section(results["rows"])]
        parts += [f"## All, on {results['gpu']}", tables.section(family, results)]
    return "\n\n".join(parts) + "\n"


def pages(folder: Path, home: Path) -> dict[Path, str]:
    """Every page below ``home``, the root of the documents, by its path."""
    by_family: dict[str, list[dict]] = {}
    for family, results in load(folder):
        by_family.setdefault(family, []).append(results)
    made = {}
    for family, found in by_family.items():
        path = home / verdict.page(family)
        drawings = sorted(folder.glob(f"*/{family}.svg"))
        above = "../" * (len(Path(verdict.page(family)).parts) - 1)
        pictures = [above + drawing.relative_to(home).as_posix() for drawing in drawings]
        made[path] = page(family, found, pictures)
    return made


def replace(text: str, table: str) -> str:
    """``text`` with the table between its markers. Raises MissingMarkers."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise MissingMarkers(f"no {BEGIN} ... {END} in it: put both, in this order, on own lines")
    return f"{text[: begin + len(BEGIN)]}\n{table}\n{text[end:]}"


def main(argv=None, readme: Path | None = None, folder: Path | None = None) -> int:
    """Write README's table and the pages beside it, or check them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--check", action="store_true", help="exit 1 if something is stale")
    options = parser.parse_args(argv)
    readme, folder = readme or ROOT / "README.md", folder or ROOT / "benchmarks" / "results"
    results = load(folder)
    try:
        overview = verdict.overview(results) if results else NOTHING
        wanted = {readme: replace(readme.read_text(), overview)}
    except MissingMarkers as error:
        print(f"{readme}: {error}", file=sys.stderr)
        return 1
    wanted |= pages(folder, readme.parent)
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path} is stale: run python -m benchmarks.report", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
    return int(bool(stale) and options.check)
