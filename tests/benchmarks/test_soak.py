"""The soak in small, so that it cannot rot, and that it sees what it looks for."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common import harness
from benchmarks.service import soak, soak_damages
from benchmarks.service.soak_workers import check, fill, fork, forked, key, use
from kernlib.jit import environment, layers, locks
from tests.support.paths import ROOT

COMMAND = [sys.executable, "-m", "benchmarks.service.soak", "--seed", "1"]
SMALL = ["--processes", "2", "--keys", "3", "--kills", "15", "--damages", "12"]
KEYS = 100  # enough for a branch page


def run(*arguments):
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_small_soak_keeps_its_promises_and_puts_rows_beside_those_that_are_there(tmp_path):
    path = tmp_path / "service.json"
    other = harness.Row("hot call", "us", 8.0, must=12.0).as_json()
    harness.write(path, soak.merged([other], path))
    done = run(*SMALL, "--json", str(path))
    broken = [line for line in (done.stdout + done.stderr).splitlines() if "BROKEN" in line]
    # Milliseconds follow the machine's pace, and are looked at where the soak is run whole.
    assert [line for line in broken if "(ms)" not in line] == [], done.stdout + done.stderr
    assert done.returncode == bool(broken), done.stderr
    found = {row["case"]: row for row in json.loads(path.read_text())["rows"]}
    assert found.pop("hot call") == other
    assert found["soak 2x3 compiles per key"]["ours"] == 1
    assert 20e6 < found["soak 2x3 largest process"]["ours"] < found["soak 2x3 peak memory"]["ours"]
    assert found["soak 15 kills: entries lost"]["must"] == 0
    assert found["soak 15 kills: entries committed"]["ours"] > 0
    assert found["soak 12 damages: calls"]["ours"] == 12 * 2 * soak_damages.KEYS
    assert {row["unit"] for row in found.values()} == {"s", "ms", "bytes", "count"}
    assert all(case in done.stdout for case in found)


def test_the_file_of_another_gpu_is_refused_before_any_work(tmp_path):
    path = tmp_path / "service.json"
    harness.write(path, {**soak.merged([], path), "gpu": "another"})
    done = run(*SMALL, "--json", str(path))
    assert done.returncode == 1 and "holds results of another" in done.stderr
    assert "seed" not in done.stdout


def test_a_value_over_its_limit_is_a_broken_promise():
    found = soak.Found()
    found.row("fine", "count", 0, 0)
    found.row("free", "count", 9)
    assert found.broken == []
    found.row("lost", "count", 1, 0)
    assert found.broken == ["lost: 1 (count), must be at most 0"]


# What the check after kills sees.


@pytest.fixture
def filled(tmp_path):
    assert forked(lambda: fill(tmp_path, KEYS), 60)[0] == 0
    return tmp_path


def checked(folder, numbers=range(KEYS)):
    status, answer = forked(lambda: check(folder, list(numbers)), 60)
    assert status == 0
    return answer


def test_a_store_that_is_whole_passes(filled):
    assert checked(filled) == [0, []]


def test_lost_and_damaged_entries_are_counted(filled):
    def spoil():
        use(filled)
        store = layers.layers().store
        store.delete(key(3))
        store.put(key(4), store.get(key(5)))
        store.close()

    assert forked(spoil, 60)[0] == 0
    assert checked(filled)[0] == 2


def test_locks_that_are_held_and_files_that_nobody_needs_are_named(filled):
    root = filled / "cache" / "v1"
    (root / "store.tmp").write_text("")
    (root / "store" / "data.mdb-old").write_text("")
    with locks.hold_file(root / "locks" / "0a.lock", 1):
        broken = checked(filled)[1]
    assert broken[0] == "lock 0a is stale" and len(broken) == 3
    assert {Path(text.split()[-1]).name for text in broken[1:]} == {"store.tmp", "data.mdb-old"}


def test_a_child_that_dies_or_hangs_is_told():
    assert forked(lambda: os.kill(os.getpid(), 9), 60)[0] == -9
    status, answer = fork(lambda: time.sleep(30), 1).result()
    assert (status, answer) == (-14, None)
    assert forked(lambda: [1, "two"], 60) == (0, [1, "two"])


# Damage.


@pytest.fixture
def snapshot(filled):
    return soak_damages.Snapshot(filled / "cache" / "v1")


def test_the_structural_pages_are_those_of_the_trees(snapshot):
    kinds = [snapshot.content[page * 4096 + 10] for page in snapshot.structure]
    assert kinds[:2] == [8, 8] and set(kinds[2:]) == {1, 2}
    assert len(set(snapshot.structure)) == len(snapshot.structure) < len(snapshot.pages) / 4


@pytest.mark.parametrize("kind", soak_damages.DAMAGES)
def test_a_damage_changes_the_file_and_can_keep_its_time(snapshot, kind):
    snapshot.restore()
    assert environment.walk(snapshot.data) == []
    before = environment.fingerprint(snapshot.data)
    soak_damages.DAMAGES[kind](snapshot, random.Random(1))
    with open(snapshot.data, "rb") as file:
        assert file.read(len(snapshot.content)) != snapshot.content
    assert environment.fingerprint(snapshot.data) != before
    snapshot.keep_time()
    assert (environment.fingerprint(snapshot.data) == before) == (kind != "truncated")
