"""Runs the scripts of the gallery, and writes their pictures, results and pages.

``python -m benchmarks.gallery [--device cuda] [--only NAME]``. A script runs in a process of its
own, on a CPU by one thread. ``--pages`` writes pages alone, of the results that are there;
``--check`` exits 1 where pages, pictures or results are not those of the scripts.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import harness
from benchmarks.common.harness import Row, note
from benchmarks.gallery import pages
from benchmarks.gallery.scripts import FOLDER, ROOT, Script, read_all
from benchmarks.report.tables import short
from kernlib.jit import sources

SECONDS = 600  # that a script may take
MOST_BYTES = 150_000  # of a picture
EXACT_BYTES = 20_000  # up to which a raster image in it keeps its colours
AGAIN = "run python -m benchmarks.gallery"
# Of matplotlib: the same bytes each time.
STYLE = "svg.hashsalt: {}\nsavefig.dpi: 130\n"


def machine(device: str) -> dict[str, str]:
    """The head of a result file, with the CPU in the GPU's place."""
    head = {**harness.machine(), "sources": sources.digest("").hex()}
    cpu = {"gpu": f"{harness.cpu()}, 1 thread", "driver": "none"}
    return head | (cpu if device == "cpu" else {})


def place(head: dict[str, str]) -> str:
    """The folder of its results."""
    return pages.CPU if head["driver"] == "none" else short(head["gpu"]).lower()


def run(script: Script, device: str, picture: Path) -> dict | None:
    """The row of a result file, or None with a note where the script fails; writes the picture."""
    with tempfile.TemporaryDirectory() as folder:
        style, drawn, result = (Path(folder, n) for n in ("matplotlibrc", "x.svg", "x.json"))
        style.write_text(STYLE.format(script.name))
        variables = {"PYTHONPATH": str(ROOT), "MATPLOTLIBRC": str(style)}
        if device == "cpu":
            variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(FOLDER / f"{script.name}.py"), "--device", device]
        command += ["--plot", str(drawn), "--json", str(result)]
        try:
            subprocess.run(command, env={**os.environ, **variables}, timeout=SECONDS, check=True)
            image, measured = drawn.read_text(), json.loads(result.read_text())
        except (subprocess.SubprocessError, OSError) as error:
            note(f"{script.name} failed: {error}")
            return None
        image = compact(image) if len(image) > MOST_BYTES else image
        if len(image) > MOST_BYTES:
            note(f"{script.name}: its picture has {len(image)} bytes, rasterise its many parts")
            return None
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(image)
    return row(script, measured)


def compact(image: str) -> str:
    """An SVG with 256 colours, or fewer, in each large raster image of it."""
    from PIL import Image  # which matplotlib brings

    def smaller(match: re.Match) -> str:
        if len(match[1]) <= EXACT_BYTES:
            return match[0]
        raster = Image.open(io.BytesIO(base64.b64decode(match[1]))).convert("RGBA")
        file = io.BytesIO()
        raster.quantize(256, Image.Quantize.FASTOCTREE).save(file, "png", optimize=True)
        shorter = base64.b64encode(file.getvalue()).decode()
        return f'"data:image/png;base64,{min(shorter, "".join(match[1].split()), key=len)}"'

    return re.sub(r'"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)"', smaller, image)


def row(script: Script, measured: dict) -> dict:
    """The row of what a script has written: kernlib's time first, the error last."""
    sizes, times = measured["sizes"], measured["ms"]
    case = " ".join([script.name, *(f"{name}={size}" for name, size in sizes.items())])
    _, *rivals = times
    error = next(v for name, v in measured.items() if name not in ("sizes", "ms"))
    ours = times[next(iter(times))]
    entry = Row(case, "ms", ours, rivals={way: times[way] for way in rivals}, error=error)
    return {**entry.as_json(), "sources": script.digest}


def stale(scripts: Sequence[Script], results: pages.Results, home: Path) -> list[str]:
    """What is not that of the scripts and results, and what to do about it."""
    texts = pages.pages(scripts, results, home)
    pictures = {home / f"{script.name}.svg" for script in scripts}
    changed = [p for p, text in texts.items() if not p.exists() or p.read_text() != text]
    said = [f"{path} is stale: {AGAIN} --pages" for path in changed]
    said += [f"{path} is missing: {AGAIN}" for path in sorted(pictures) if not path.exists()]
    beside = {path for path in home.glob("*") if path.is_file()} - pictures - texts.keys()
    said += [f"{path} is of no script: delete it" for path in sorted(beside)]
    measured = dict(results).get(pages.CPU, {"rows": []})
    for script in scripts:
        entry = pages.row_of(script, measured)
        if entry is None or entry["sources"] != script.digest:
            said.append(f"{script.name} is not measured as it is: {AGAIN} --only {script.name}")
    return said


def main(argv: Sequence[str] | None = None, home: Path = pages.HOME) -> int:
    """Run, write or check. Returns the exit status."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--only", action="append", metavar="NAME", help="run this script alone")
    parser.add_argument("--pages", action="store_true", help="write pages alone, run nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 if something is stale")
    options = parser.parse_args(argv)
    scripts, failed = read_all(), 0
    if options.check:
        said = stale(scripts, pages.load(), home)
        print(*said, sep="\n", end="\n" * bool(said), file=sys.stderr)
        return int(bool(said))
    names = {script.name for script in scripts}
    if unknown := set(options.only or ()) - names:
        parser.error(f"--only {' '.join(sorted(unknown))}: there are {', '.join(sorted(names))}")
    if not options.pages:
        chosen = [script for script in scripts if script.name in (options.only or names)]
        failed = _measure(chosen, options.device, home, names)
    for path, text in pages.pages(scripts, pages.load(), home).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return int(failed > 0)


def _measure(chosen: Sequence[Script], device: str, home: Path, names: set[str]) -> int:
    """Runs scripts; each row is written as soon as it is known. Returns how many failed."""
    head = machine(device)
    path, failed = pages.RESULTS / place(head) / pages.FILE, 0
    old = harness.read(path)
    if old is not None and old["gpu"] != head["gpu"]:
        if len(chosen) < len(names):
            raise SystemExit(f"{path} holds results of {old['gpu']}: run all on {head['gpu']}")
        path.unlink()
    for script in chosen:
        print(f"== {script.name}", flush=True)
        measured = run(script, device, home / f"{script.name}.svg")
        if measured is None:
            failed += 1
            continue
        old = harness.read(path)
        if old is not None:  # without rows of other sizes, and of scripts that are gone
            gone = {script.name} | {r["case"].split()[0] for r in old["rows"]} - names
            old["rows"] = [r for r in old["rows"] if r["case"].split()[0] not in gone]
        merged = harness.merge(head, [measured], old)
        merged["rows"].sort(key=lambda r: r["case"])
        harness.write(path, merged)
    return failed
