"""Shared by the tests of benchmarks: what rows must be, those that are committed, and a timer."""

import json

from tests.support.paths import ROOT

HEAD = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "nvrtc": "13.0",
        "kernlib": "0.1.0", "sources": "ab12", "date": "2026-01-01"}  # fmt: skip
ROW = {"case", "unit", "ours", "floor", "bound", "rivals", "error", "rival_errors"}
OPTIONAL = {"must", "must_error", "sources", "host"}
COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))


def committed(family):
    """The rows of a family by case, of all GPUs."""
    paths = [path for path in COMMITTED if path.stem == family]
    return {row["case"]: row for path in paths for row in json.loads(path.read_text())["rows"]}


def check_schema(found):
    assert set(found) - {"host"} == {*HEAD, "rows"}  # which results before 2026-11-29 lack
    assert all(isinstance(found[name], str) and found[name] for name in HEAD)
    names = [one["case"] for one in found["rows"]]
    assert len(set(names)) == len(names)
    for one in found["rows"]:
        assert set(one) - OPTIONAL == ROW, one["case"]
        check_numbers(one)


def check_numbers(one):
    counted = one["unit"] == "count"
    assert counted or one["unit"] in ("s", "ms", "us", "bytes")
    assert one["ours"] > 0 or (counted and one["ours"] == 0)
    assert one["floor"] is None or (one["floor"] > 0 and one["bound"])
    assert one["error"] is None or 0 <= one["error"] < 1
    assert all(value > 0 for value in one["rivals"].values())
    assert set(one["rival_errors"]) <= set(one["rivals"])


class Clock:
    """A timer that runs every call, and by which all that are swept take the same, and all that are
    replayed."""

    def __init__(self, swept_ms=0.25, replayed_ms=0.25):
        self.swept_ms, self.replayed_ms = swept_ms, replayed_ms
        self.sweeps, self.replays = 0, 0

    def swept(self, call, buffers):
        call(*buffers)
        self.sweeps += 1
        return self.swept_ms

    def replayed(self, call, buffers, repetitions):
        call(*buffers)
        self.replays += 1
        return self.replayed_ms
