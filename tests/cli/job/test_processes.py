"""`kernlib doctor --distributed` in processes with the environment that torchrun sets."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

ARGUMENTS = "doctor", "--distributed"
MAIN = "from kernlib.cli import main; main()"
SHORT = f"from kernlib.cli.job import doctor; doctor.TIMEOUT = 2.0; {MAIN}"
LIMIT_S = 300


def job(cache_dir, ranks, *arguments, code=MAIN, **of_the_last) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each of two processes, of which ``ranks`` are started; the
    last has further variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in ranks:
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        meeting = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = os.environ | places | meeting | {"CUDA_VISIBLE_DEVICES": ""}
        environ |= {"KERNLIB_CACHE_DIR": str(cache_dir)} | (of_the_last if rank else {})
        words = [sys.executable, "-c", code, *ARGUMENTS, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen(words, env=environ, **pipes))
    try:
        outputs = [child.communicate(timeout=LIMIT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, *out) for child, out in zip(children, outputs, strict=True)]


def test_the_first_process_says_what_all_have_and_how_they_exchange(cache_dir):
    (code, out, errors), other = job(cache_dir, (0, 1), "--json")
    assert code == 0, errors
    assert other[:2] == (0, ""), other
    facts = json.loads(out)
    assert facts["ok"] and [process["rank"] for process in facts["processes"]] == [0, 1]
    for process in facts["processes"]:
        assert process["device"] is None and process["versions"]["kernlib"]
        assert process["cache"] == {"folder": str(cache_dir), "writable": True}
        assert "compile" in {finding["label"] for finding in process["findings"]}
    (gloo,) = facts["exchange"]
    assert (gloo["label"], gloo["status"]) == ("gloo", "ok") and gloo["details"]["ms"] > 0
    assert "--nproc-per-node 2 -m kernlib.distributed.demo" in facts["next"][-1]


def test_what_fails_in_one_process_ends_all_with_1(cache_dir):
    answers = job(cache_dir, (0, 1), KERNLIB_CACHE_BYTES="plenty")
    (code, out, errors), other = answers
    assert (code, *other[:2]) == (1, 1, ""), answers
    head, _, first, second, *_ = out.splitlines()
    assert head.startswith("rank  host") and "shared" not in out
    assert f"{cache_dir}, writable" in first and "1 FAIL" in second
    assert "FAIL  settings    rank 1: KERNLIB_CACHE_BYTES='plenty'" in out
    assert "1. settings: unset the variable" in out and "by torchrun again" in out
    # What torch 2.8 says of peers is no error.
    assert "ok    gloo" in out and not re.sub(r"(?m)^\[Gloo\].*\n", "", errors)


def test_a_process_that_does_not_come_is_an_error_in_the_others(cache_dir):
    ((code, out, errors),) = job(cache_dir, (0,), code=SHORT)
    assert (code, out) == (1, "") and errors.count("Error: ") == 1, errors
    assert "do not meet at 127.0.0.1:" in errors and "within 2 s, seen from rank 0 of 2" in errors
    assert "Traceback" not in errors
