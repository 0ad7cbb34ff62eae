"""The comparison of two results: files, and two commits in turn by a runner that only notes."""

import json
import subprocess

import pytest

from benchmarks import compare
from benchmarks.common import harness
from tests.benchmarks.cases import HEAD


def results(**cases):
    rows = [harness.Row(case, unit, value).as_json() for case, (value, unit) in cases.items()]
    return {**HEAD, "rows": rows}


def verdict(old, new, unit="ms"):
    return compare.Line("case", unit, old, new).verdict


@pytest.mark.parametrize(
    ("old", "new", "unit", "wanted"),
    [
        (1.0, 1.029, "ms", ""),
        (1.0, 1.031, "ms", "worse"),
        (1.0, 0.96, "ms", "better"),
        (8.0, 8.4, "us", ""),  # 5 %, but less than half a microsecond
        (8.0, 8.6, "us", "worse"),
        (0.008, 0.0084, "ms", ""),
        (1000.0, 1000.6, "us", ""),
        (100, 102, "bytes", ""),
        (100, 104, "bytes", "worse"),
        (0, 0, "count", ""),
        (0, 1, "count", "worse"),
        (1.0, None, "ms", "missing"),
        (None, 1.0, "ms", "added"),
    ],
)
def test_verdicts(old, new, unit, wanted):
    assert verdict(old, new, unit) == wanted


@pytest.fixture
def files(tmp_path):
    def write(old, new):
        paths = [tmp_path / "old.json", tmp_path / "new.json"]
        for path, found in zip(paths, (old, new), strict=True):
            harness.write(path, found)
        return [str(path) for path in paths]

    return write


def test_two_files_and_the_exit_status(files, capsys):
    old = results(same=(2.0, "ms"), slow=(2.0, "ms"), gone=(1.0, "us"), fast=(30.0, "us"))
    paths = files(old, results(same=(2.01, "ms"), slow=(2.2, "ms"), fast=(20.0, "us")))
    assert compare.main(paths) == 1
    said = capsys.readouterr().out
    assert "4 cases: 1 worse, 1 missing, 1 better, 0 added" in said
    rows = {line.split("│")[1].strip(): line for line in said.splitlines() if "│" in line}
    assert "2.000 ms" in rows["slow"] and "1.100" in rows["slow"] and "worse" in rows["slow"]
    assert "missing" in rows["gone"] and "better" in rows["fast"]
    assert said.index("slow") < said.index("same")
    assert compare.main([*paths, "--case", "same", "--case", "fast"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "another"}, "results of NVIDIA H200 and another cannot be compared"),
        ({"rows": results(a=(1.0, "us"))["rows"]}, "a is measured in ms and in us"),
    ],
)
def test_what_cannot_be_compared(files, change, message, capsys):
    old = results(a=(1.0, "ms"))
    assert compare.main(files(old, old | change)) == 2
    assert message in capsys.readouterr().err


def test_nothing_in_common_is_no_success(files):
    paths = files(results(a=(1.0, "ms")), results(a=(1.0, "ms")))
    assert compare.main([*paths, "--case", "nothing"]) == 2


# Two commits, or checkouts.


class Fake:
    """Writes results of its own and notes who ran: the second run of each side is the faster."""

    def __init__(self, **seconds):
        self.seconds, self.ran = seconds, []

    def __call__(self, tree, family, path, arguments):
        side = path.parent.name
        self.ran.append((side, family, tree, tuple(arguments)))
        if side in self.seconds:
            value = self.seconds[side] / (1 + int("-1." in path.name))
            harness.write(path, results(**{f"{family} a": (value, "ms")}))


def test_checkouts_are_measured_in_turn(tmp_path, capsys):
    trees = [tmp_path / name for name in ("before", "after")]
    for tree in trees:
        (tree / "benchmarks").mkdir(parents=True)
    fake = Fake(old=2.0, new=2.0)
    arguments = [*map(str, trees), "--family", "sparse", "--family", "service", "--quick"]
    kept = ["--case", "a", "--json", str(tmp_path / "kept")]
    assert compare.main([*arguments, *kept], fake) == 0
    sides = [(side, tree.name) for side, _, tree, _ in fake.ran]
    assert sides == [("old", "before"), ("new", "after")] * 4
    assert [family for _, family, _, _ in fake.ran] == ["sparse"] * 4 + ["service"] * 4
    assert {given for *_, given in fake.ran} == {("--case", "a", "--quick")}
    assert "2 cases: 0 worse" in capsys.readouterr().out
    rows = json.loads((tmp_path / "kept" / "new.json").read_text())["rows"]
    assert [row["ours"] for row in rows] == [1.0, 1.0]
    assert compare.main(arguments, Fake(old=2.0, new=3.0)) == 1
    assert compare.main(arguments, Fake(old=2.0)) == 2
    assert "no benchmark of the new commit left results" in capsys.readouterr().err


def test_commits_get_worktrees_that_are_removed(tmp_path, monkeypatch, capsys):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "benchmarks").mkdir()
    for text in ("one", "two"):
        (tmp_path / "benchmarks" / "file").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", text)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    seen = []

    def runner(tree, family, path, arguments):
        seen.append((tree / "benchmarks" / "file").read_text())
        Fake(old=1.0, new=1.0)(tree, family, path, arguments)

    assert compare.main(["HEAD~1", "HEAD", "--family", "sparse"], runner) == 0
    assert seen == ["one", "two"] * 2
    trees = subprocess.check_output(["git", "-C", str(tmp_path), "worktree", "list"], text=True)
    assert len(trees.splitlines()) == 1
    assert compare.main(["nosuch", "HEAD"], runner) == 2
    assert "nosuch is no result file, checkout or commit" in capsys.readouterr().err


def test_a_benchmark_runs_the_code_of_its_tree(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    code = "import json, os, sys; json.dump([os.getcwd(), *sys.argv[1:]], open(sys.argv[2], 'w'))"
    (tmp_path / "benchmarks" / "sparse.py").write_text(code)
    path = tmp_path / "out" / "sparse-0.json"
    path.parent.mkdir()
    compare.run_benchmark(tmp_path, "sparse", path, ["--quick"])
    assert json.loads(path.read_text()) == [str(tmp_path), "--json", str(path), "--quick"]
