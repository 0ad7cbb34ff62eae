"""Every example runs as a user runs it, and finds itself right."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.terminals import drained, terminal

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Fewer points than by default, whose K has 14.4 GB: other tests may be on the same GPU; and fewer
# steps, where the default takes minutes.
ON_THE_GPU = {
    "block_sparse_mlp": ("--steps", "60"),
    "kernel_ridge": ("--train", "20000"),
    "sparse_decoder": ("--tokens", "16"),
    "falkon": ("--rows", "1000000", "--centres", "3000"),
    "gaussian_process": ("--train", "10000", "--steps", "5"),
    "sparse_attention": ("--steps", "30"),
}

# What all but those without times say of them.
ON_A_CPU = "On a CPU torch computes everything: these times say nothing of the kernels.\n"
UNTIMED = {"quickstart", "custom_epilogue"}


def run(
    example: Path, cache_dir: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess:
    # One thread: several, beside another test's, wait for each other, 70 s in place of 11.
    variables = {"KERNLIB_CACHE_DIR": str(cache_dir), "OMP_NUM_THREADS": "1"} | variables
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, str(example), *arguments],
        env=environment,
        cwd=cache_dir,
        capture_output=True,
        text=True,
    )


def test_there_are_examples():
    names = {example.stem for example in EXAMPLES}
    wanted = {"quickstart", "custom_epilogue", "kronecker_vit", "kernel_ridge", "sparse_decoder"}
    assert wanted <= names


@pytest.mark.slow
@pytest.mark.few(1000)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_the_cpu(example, tmp_path):
    found = run(example, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 0, found.stderr
    assert "cpu   relative error" in found.stdout
    assert (ON_A_CPU in found.stdout) == (example.stem not in UNTIMED)
    assert found.stderr == ""


@pytest.mark.slow
def test_an_example_shows_progress_to_who_watches(tmp_path):
    """On a stderr that is a terminal, and what it prints stays on stdout."""
    example = next(path for path in EXAMPLES if path.stem == "kronecker_vit")
    words = [sys.executable, str(example), "--device", "cpu", "--steps", "5"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    primary, secondary = terminal(80)
    with open(tmp_path / "out", "w") as out:
        child = subprocess.Popen(
            words, env={**os.environ, **variables}, cwd=tmp_path, stdout=out, stderr=secondary
        )
    os.close(secondary)
    shown = drained(primary)
    assert child.wait() == 0
    assert "training" in shown and "relative error" not in shown
    assert "cpu   relative error" in (tmp_path / "out").read_text()


RIDGE = EXAMPLES[0].parent / "kernel_ridge.py"
WAYS = ("direct", "matrix-free", "plain torch")


@pytest.mark.slow
def test_all_ways_to_kernel_ridge_regression_agree(tmp_path):
    arguments = ("--device", "cpu", "--train", "1000", "--features", "16", "--seed", "3")
    found = run(RIDGE, tmp_path, *arguments, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 0, found.stderr
    row = rf"│ ({'|'.join(WAYS)}) +│ +1000 " + 3 * r"│ +([\d.]+) " + r"│ +(\d+) │"
    rows = {way: tuple(map(float, rest)) for way, *rest in re.findall(row, found.stdout)}
    assert tuple(rows) == WAYS
    r2, rmse, seconds, memory = zip(*rows.values(), strict=True)
    assert min(r2) > 0.95 and max(rmse) < 0.25
    assert max(r2) - min(r2) <= 2e-4 and max(rmse) - min(rmse) <= 2e-4
    assert min(seconds) > 0 and min(memory) > 0
    errors = re.findall(r"relative error ([^\s,]+)", found.stdout)
    apart = re.findall(r", predictions (\S+) from plain torch's", found.stdout)
    assert len(errors) == 3 and len(apart) == 2  # plain torch beside itself says nothing
    assert max(map(float, errors + apart)) < 1e-3


@pytest.mark.slow
def test_kernel_ridge_regression_is_drawn_where_matplotlib_is(tmp_path):
    arguments = ("--device", "cpu", "--train", "160", "--plot", str(tmp_path / "ridge.png"))
    found = run(RIDGE, tmp_path, *arguments, CUDA_VISIBLE_DEVICES="")
    if importlib.util.find_spec("matplotlib") is None:
        assert found.returncode == 2 and "pip install matplotlib" in found.stderr
        return
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "ridge.png").stat().st_size > 0
    assert all(found.stdout.count(f"│ {way} ") == 4 for way in WAYS)  # numbers of points


SPARSE_ATTENTION = EXAMPLES[0].parent / "sparse_attention.py"


def test_letters_behind_a_name_are_those_of_its_introduction():
    names = runpy.run_path(str(SPARSE_ATTENTION))
    config = names["SMALL"]
    text = names["Author"](config).write(64, 3)
    reach = (0, *config.lengths)
    for row, ranges in zip(text.tokens.tolist(), text.ranges.tolist(), strict=True):
        introduced: dict[int, tuple[int, int]] = {}  # place and letter of each name
        for place, (name, letter) in enumerate(itertools.pairwise(row), 1):
            if name < config.letters:
                assert ranges[place] == 0
                continue
            first, known = introduced.setdefault(name, (place, letter))
            assert letter == known < config.letters
            assert (ranges[place] > 0) == (place > first)
            assert place - first <= reach[ranges[place]]
    assert set(text.ranges.unique().tolist()) == {0, 1, 2, 3}


def test_nats_of_a_token_are_those_of_its_chance():
    names = runpy.run_path(str(SPARSE_ATTENTION))
    config = names["SMALL"]
    tokens, ranges, nats = names["Author"](config).write(64, 3)
    is_name, chances = tokens >= config.letters, nats.neg().exp()
    is_value = torch.nn.functional.pad(is_name[:, :-1], (1, 0))
    assert (chances[ranges > 0] == 1).all()  # letters that are known
    torch.testing.assert_close(1 / chances[is_value & (ranges == 0)].unique(), torch.tensor([16.0]))
    counts = {round(1 / chance) for chance in chances[is_name].unique().tolist()}
    assert counts == {1, 24, 48, 96}  # introductions, and a quarter over 3 ranges and their people
    letters = chances[~is_name & ~is_value].mul(1e4).round().int().unique().tolist()
    assert letters == [
        750,
        1000,
        5250,
        7000,
    ]  # of the chances, where a name may stand and where not


@pytest.mark.slow
def test_layouts_of_sparse_attention_are_drawn_where_matplotlib_is(tmp_path):
    arguments = ("--device", "cpu", "--steps", "6", "--length", "128")
    arguments += ("--plot", str(tmp_path / "layouts.png"))
    found = run(SPARSE_ATTENTION, tmp_path, *arguments, CUDA_VISIBLE_DEVICES="")
    if importlib.util.find_spec("matplotlib") is None:
        assert found.returncode == 2 and "pip install matplotlib" in found.stderr
        return
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "layouts.png").stat().st_size > 0
    rows = re.findall(r"│ (window|window \+ global|learned|dense) +│ +([\d.]+) ", found.stdout)
    density = {name: float(value) for name, value in rows if float(value) < 1}
    assert density["window"] < density["learned"] <= density["window + global"] < density["dense"]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.few(1000)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_the_gpu(example, tmp_path):
    found = run(example, tmp_path, *ON_THE_GPU.get(example.stem, ()))
    assert found.returncode == 0, found.stderr
    assert "cuda  relative error" in found.stdout
