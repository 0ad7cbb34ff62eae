"""Tables and sentences at the widths of terminals, and in pipes; progress that leaves nothing."""

from __future__ import annotations

import re

import pytest

from kernlib import events, progress
from kernlib.cli import output
from tests.cli.cases import keep, on_terminal

WIDTHS = (80, 100, 160)
COLUMNS = {"key": "left", "size": "right", "spills": "right", "made": "left", "words": "left"}
ROWS = [
    ("0123456789ab", "27.5 KB", 0, "2026-11-24 19:07", "gaussian float32 tile=64"),
    ("ba9876543210", "1.5 KB", 12, "2026-11-24 19:08", " ".join(["many"] * 60)),
]
SPARE = ("made", "spills")


@pytest.fixture
def printed(monkeypatch, capsys):
    """What is printed on a terminal of so many columns; None stands for a pipe."""

    def run(width, *arguments, **options):
        monkeypatch.setattr(output, "terminal_width", lambda: width)
        output.print_table(*arguments, **options)
        return capsys.readouterr()

    return run


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_fits_and_breaks_no_word(printed, width):
    found = printed(width, COLUMNS, ROWS, spare=SPARE)
    lines = found.out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["key", "size", "spills", "made", "words"] and found.err == ""
    assert found.out.split().count("many") == 60


def test_columns_go_before_words_are_broken(printed):
    found = printed(60, COLUMNS, ROWS, spare=SPARE)
    assert found.out.splitlines()[0].split() == ["key", "size", "spills", "words"]
    assert "--json show made too" in found.err and max(map(len, found.out.splitlines())) <= 60
    found = printed(52, COLUMNS, ROWS, spare=SPARE)
    assert found.out.splitlines()[0].split() == ["key", "size", "words"]
    assert "--json show spills, made too" in found.err.replace("\n", " ")


def test_where_nothing_helps_a_row_stays_one_line(printed):
    found = printed(30, COLUMNS, ROWS, spare=SPARE)
    assert len(found.out.splitlines()) == 2 + len(ROWS)


def test_a_pipe_gets_every_column_and_one_line_a_row(printed):
    found = printed(None, COLUMNS, ROWS, title="title", spare=SPARE)
    title, heading, _, *rows = found.out.splitlines()
    assert title.strip() == "title" and heading.split() == list(COLUMNS) and found.err == ""
    assert [row.split()[0] for row in rows] == [row[0] for row in ROWS]


def test_a_table_without_rows(printed):
    assert printed(80, COLUMNS, []).out.splitlines()[0].split() == list(COLUMNS)


@pytest.mark.parametrize("width", WIDTHS)
def test_sentences_are_folded_for_the_eye(monkeypatch, capsys, width):
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    output.say(" ".join(["word"] * 60) + "\nanother", start="ok  ", hang="    ")
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= min(width, output.SENTENCE_WIDTH) and last == "    another"
    assert lines[0].startswith("ok  word") and all(line.startswith("    ") for line in lines[1:])


def test_sentences_in_a_pipe_stay_lines(capsys):
    output.say("word " * 60, start="ok  ")
    assert capsys.readouterr().out == "ok  " + "word " * 60 + "\n"


# Commands on a terminal.


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_of_kernels_on_a_terminal(cache_dir, width):
    known = {"registers": "96", "spill_bytes": "0", "shared_bytes": "17408", "compile_ms": "153"}
    keep("gaussian float32 tile=64 features/features", created="1700000000", **known)
    custom = "l2_distance(Custom(expression='gain * v', parameters=('gain',))) float32 tile=64"
    key = keep(custom, created="1600000000", **known)
    code, lines = on_terminal(width, "cache", "list")
    assert code == 0 and max(map(len, lines)) <= width
    heading = next(line for line in lines if line.startswith("key"))
    shown = {80: False, 100: True, 160: True}[width]
    assert ("registers" in heading) is shown and "description" in heading
    told = " ".join(lines)
    assert key.hex()[:12] in told and "gaussian float32" in told
    assert all(word in told.split() for word in ("features/features", "tile=64"))
    assert ("A wider terminal" in told) is (width < 160)


def test_progress_of_unknown_length_is_gone_when_it_ends(cache_dir):
    code, lines = on_terminal(80, "cache", "verify")
    assert code == 0 and not [line for line in lines if "reading" in line]


def test_nobody_is_shown_what_nobody_watches(capsys):
    with progress.busy("reading"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.few(1)
@pytest.mark.parametrize("width", WIDTHS)
def test_what_was_compiled_on_a_terminal(cache_dir, width):
    call = ("--shape", "500x4", "--shape", "400x4", "--argument", "bandwidth=1")
    code, lines = on_terminal(width, "compile", "gaussian", "--arch", "80", *call)
    assert code == 0
    row = next(line for line in lines if line.startswith("sm_80 "))
    assert len(row) <= width and re.search(r"compiled +gaussian float32 tile=64", row)


def test_a_closed_stdout_is_no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert output.terminal_width() is None


def test_events_for_a_closed_stderr_are_not_for_stdout(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", None)
    events.write_line(events.Event("torch", "", "cpu", "a call"))
    assert capsys.readouterr().out == ""
