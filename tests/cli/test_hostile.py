"""Bundles that somebody made to trouble whoever looks into them: the commands say what is there,
and the terminal obeys none of it."""

import lmdb
import pytest

from kernlib.jit import bundle, entry, service
from kernlib.jit.entry import Entry
from tests.cli.cases import aside, fresh, keep_stamped, key_of, made, make_bundle

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202eevil\u2028\x00"
HUGE = "9" * 5000
META = {
    "escapes": dict.fromkeys(("description", "arch", "family", "nvrtc", ESCAPES), ESCAPES),
    "times": {"created": HUGE},
    "a late time": {"created": "9" * 15},
    "numbers": dict.fromkeys(("registers", "spill_bytes", "shared_bytes", "compile_ms"), HUGE),
    "digits": {"created": "١٢٣", "registers": "²"},
    "version": {"nvrtc": f"13.{HUGE}"},
    "no hex": {"portable": "zz"},
    "a long key": {"portable": "00" * 600},
    "a short key": {"portable": "00"},
    "markup": {"description": "[bold red]x[/]", "arch": "[/]"},
    "nothing": {},
}
READING = (("list",), ("list", "--json"), ("info",), ("verify",), ("show", key_of("e").hex()[:16]))
OBEYED = {chr(code) for code in (*range(10), *range(11, 32), *range(127, 160))}
OBEYED |= {"\u202e", "\u2028", "\u2029"}


def hostile(name):
    known = {"description": "e", "arch": "sm_90a", "family": "pairwise", "nvrtc": "13.0"}
    return Entry(ESCAPES if name == "escapes" else "pairwise", b"cubin", known | META[name])


def tame(result):
    """No traceback, and nothing for the terminal to obey."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not OBEYED & set(result.output), result.output


@pytest.mark.parametrize("name", META)
def test_what_a_bundle_says_is_shown_and_not_obeyed(run, tmp_path, mount, compiles, name):
    bundle.write(tmp_path / "bundle", {key_of("e"): hostile(name)})
    mount(tmp_path / "bundle")
    for command in READING:
        result = run("cache", *command)
        tame(result)
        assert result.exit_code == 0, result.output
        fresh()
    tame(run("doctor"))
    fresh()
    result = run("cache", "import", tmp_path / "bundle")
    tame(result)
    assert result.exit_code == 0
    for command in READING:
        fresh()
        tame(run("cache", *command))
    fresh()
    result = run("cache", "export", tmp_path / "again")
    tame(result)
    assert result.exit_code == 0 and (tmp_path / "again" / bundle.FILE).exists()
    tame(run("cache", "show", "ffff"))


@pytest.mark.parametrize("length", [1, 31, 33, 400])
def test_keys_that_are_none_are_not_imported(run, cache_dir, tmp_path, length):
    folder = make_bundle(tmp_path / "bundle", made("good"))
    key = b"k" * length
    data = lmdb.open(str(folder / bundle.FILE), subdir=False, lock=False, max_dbs=1, lib_version=0)
    with data, data.begin(write=True) as txn:
        txn.put(key, entry.pack(key, made("bad")), db=data.open_db(bundle.DATABASE, txn=txn))
    result = run("cache", "import", folder)
    tame(result)
    assert result.exit_code == 1 and "1 damaged" in result.output
    assert [found for found, _ in service.layers().store.items()] == [key_of("good")]


def test_a_stamp_of_no_day_on_earth_is_not_shown(run, cache_dir, monkeypatch):
    keep_stamped("e", b"\xff" * 9)
    for command in (("list",), ("list", "--unused", "1"), ("show", key_of("e").hex()[:16])):
        tame(run("cache", *command))
    assert not aside(cache_dir)
