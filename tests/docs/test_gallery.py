"""The gallery: each script runs as a user runs it, and its page is of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks.gallery import pages, run, scripts
from tests.benchmarks.cases import check_schema

SCRIPTS = scripts.read_all()
YOURS = scripts.YOURS
drawn = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="pictures need matplotlib"
)


def each(function):
    return pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)(function)


def written(folder, text, name="some.py"):
    path = folder / name
    path.write_text(text)
    return path


TEXT = f'"""A title: what it is of.\n\nFirst words. More.\n\n{YOURS}Change x.\n"""\n\nx = 1\n'


@pytest.mark.slow
@pytest.mark.few(1000)
@each
def test_a_script_runs_on_the_cpu(script, tmp_path):
    result = tmp_path / "result.json"
    # A cache of its own, and one thread, as the other examples have.
    variables = {"KERNLIB_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(scripts.FOLDER / f"{script.name}.py"), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--json", str(result)],
        env={**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert pages.ON_A_CPU.replace("those", "these") in done.stdout
    assert done.stderr == ""
    row = run.row(script, json.loads(result.read_text()))
    assert row["ours"] > 0 and row["rivals"]


@drawn
@pytest.mark.slow
def test_a_picture_has_the_same_bytes_each_time(tmp_path):
    (script,) = (script for script in SCRIPTS if script.name == "kernel_pca")
    pictures = [tmp_path / name for name in ("a.svg", "b.svg")]
    rows = [run.run(script, "cpu", picture) for picture in pictures]
    assert [row["case"] for row in rows] == ["kernel_pca n=900"] * 2
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_pages_and_pictures_are_those_of_the_scripts():
    assert run.main(["--check"]) == 0, "run python -m benchmarks.gallery"


def test_committed_results_have_the_schema_of_all():
    for _, results in pages.load():
        check_schema(results)


def test_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in pages.HOME.glob("*.svg")}
    assert sizes and max(sizes.values()) <= run.MOST_BYTES


@each
def test_a_docstring_has_title_text_and_what_to_change(script):
    assert script.title and script.summary.endswith(".") and "\n" not in script.summary
    parts = script.text.split("\n\n")
    assert len(parts) >= 2 and parts[-1].startswith(YOURS)


@each
def test_a_script_fits_a_page(script):
    lines = script.code.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 100
    # Either would be read as part of the page: as its code, or as a link of it.
    assert "```" not in script.code and "](" not in script.code


@each
def test_a_page_holds_its_script_and_no_code_that_documents_run(script):
    text = pages.page(script, [])
    assert f"```py\n{script.code}```\n" in text and "```python" not in text
    assert script.text in text and f"]({script.name}.svg)" in text


def test_a_script_without_a_part_is_refused(tmp_path):
    wrong = "x = 1\n", TEXT.replace("of.", "of"), TEXT.replace(YOURS, ""), "# x\n" + TEXT
    for text in (*wrong, TEXT.replace("First words. More.\n\n", "")):
        with pytest.raises(ValueError, match=r"some\.py"):
            scripts.read(written(tmp_path, text))


def test_a_title_has_a_summary_behind_its_colon_or_the_first_sentence(tmp_path):
    script = scripts.read(written(tmp_path, TEXT))
    assert (script.title, script.summary) == ("A title", "What it is of.")
    script = scripts.read(written(tmp_path, TEXT.replace("title: what it is of", "title")))
    assert (script.title, script.summary) == ("A title", "First words.")


def test_a_digest_is_of_the_code_alone(tmp_path):
    texts = TEXT, TEXT.replace("More", "Less"), TEXT.replace("x = 1", "x = 2")
    first, text, code = (scripts.read(written(tmp_path, each)).digest for each in texts)
    assert first == text != code


def test_times_of_all_machines_stand_side_by_side(tmp_path):
    script = scripts.read(written(tmp_path, TEXT))
    machines = {"cpu": "A CPU, 1 thread", "h200": "NVIDIA H200"}
    row = run.row(
        script, {"sizes": {"n": 9, "k": 3}, "ms": {"kernlib": 2.0, "torch": 5.0}, "apart": 1e-6}
    )
    heads = [
        (place, {"gpu": gpu, "torch": "2.11", "date": "2026-01-01", "rows": [row]})
        for place, gpu in machines.items()
    ]
    text = pages.page(script, heads)
    assert "|  | CPU | H200 |\n" in text and "| sizes | n = 9, k = 3 | n = 9, k = 3 |\n" in text
    assert "| kernlib | 2.00 ms | 2.00 ms |\n| torch | 5.00 ms (2.5×) |" in text
    assert "| error | 1.0e-06 |" in text and pages.ON_A_CPU in text
    assert pages.ON_A_CPU not in pages.page(script, heads[1:])


@drawn
def test_raster_images_have_few_colours(tmp_path):
    from matplotlib.figure import Figure

    page = Figure()
    page.subplots().imshow([[i * j % 997 for i in range(200)] for j in range(200)])
    page.savefig(tmp_path / "x.svg")
    image = (tmp_path / "x.svg").read_text()
    small = run.compact(image)
    assert len(small) < len(image) and small.count("<image") == image.count("<image") == 1
    assert run.compact(small) == small


def test_what_is_stale_is_named(tmp_path):
    script, home = scripts.read(written(tmp_path, TEXT)), tmp_path / "home"
    home.mkdir()
    row = run.row(script, {"sizes": {}, "ms": {"kernlib": 2.0, "torch": 5.0}, "error": 1e-6})
    results = [("cpu", {"gpu": "A CPU", "torch": "2.11", "date": "2026-01-01", "rows": [row]})]
    for path, text in pages.pages([script], results, home).items():
        path.write_text(text)
    written(home, "<svg/>", "some.svg")
    assert run.stale([script], results, home) == []
    (home / "some.svg").unlink()
    written(home, "", "some.md")
    written(home, "", "another.md")
    row["sources"] = "another"
    said = [re.sub(rf"{home}/", "", line) for line in run.stale([script], results, home)]
    assert [line.split(":")[0] for line in said] == [
        "some.md is stale", "some.svg is missing", "another.md is of no script",
        "some is not measured as it is",
    ]  # fmt: skip
