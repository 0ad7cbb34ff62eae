"""Processes on one cache: one compile for all, whoever dies, sleeps or comes too late."""

import os
import random
import signal
import subprocess
import sys
import warnings

from kernlib import settings
from kernlib.jit import entry
from kernlib.jit.locks import hold_file
from kernlib.jit.store import open_store
from tests.jit.process_cases import BUILD, ROOT

NAMES = ["one", "two", "three", "four", "five"]
KEYS = "for name in arguments: print(key(name).hex(), file=sys.stderr)"


def keys(lab, *names):
    status, lines = lab.run(KEYS, *names)
    assert status == 0, lines
    return [bytes.fromhex(line) for line in lines.split()]


def kept(lab):
    """What a process that comes later finds in the store."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = open_store(lab.cache, settings.DEFAULT_CACHE_BYTES)
    found = {key: entry.unpack(key, value) for key, value in store.items()}
    store.close()
    return found


# One compile for all.


def test_8_processes_and_one_key_are_one_compile_and_the_next_compiles_nothing(lab):
    assert lab.build(*[["one"]] * 8) == {"one": 1}
    assert lab.build(["one"]) == {}


def test_8_processes_and_mixed_keys_are_one_compile_each(lab):
    orders = [random.sample(NAMES, len(NAMES)) for _ in range(8)]
    assert lab.build(*orders) == dict.fromkeys(NAMES, 1), orders
    assert lab.build(["three", "six", "one"], ["six"]) == {"six": 1}
    assert len(kept(lab)) == 6


EXPORT = """
from kernlib.jit import bundle
bundle.write(pathlib.Path(arguments[0]), bundle.collect(layers.layers().store.items()))
"""


def test_processes_with_a_bundle_compile_what_it_lacks_once_and_nothing_else(lab, tmp_path):
    lab.build(["one", "two"])
    assert lab.run(EXPORT, str(tmp_path / "bundle")) == (0, "")
    host = {"KERNLIB_CACHE_DIR": f"{tmp_path / 'host'}:{tmp_path / 'bundle'}"}
    lab.clear()
    children = [lab.start(BUILD, *names, **host) for names in (["one", "six"], ["six", "two"])]
    lab.wait_for("ready", len(children))
    lab.mark("go")
    lab.join(children)
    assert lab.compiles() == {"six": 1}


# Death.


def test_when_the_owner_is_killed_the_one_who_waits_takes_over_at_once(lab):
    patient = {"KERNLIB_LOCK_TIMEOUT": "600"}  # longer than anything here may take
    owner = lab.start("build('one')", COMPILE_S="60")
    lab.wait_for("compile-one")
    code = "events.subscribe(lambda event: mark(f'event-{event.name}'))\nbuild('one'); mark('done')"
    next_one = lab.start(code, **patient)
    lab.wait_for("event-wait")
    owner.kill()
    lab.wait_for("done")
    lab.join([next_one])
    assert lab.compiles() == {"one": 2}
    assert lab.build(["one"]) == {}


DIE_IN_PUT = """
from kernlib.jit.store import LmdbStore
write = LmdbStore._write
def die(self, txn, *pair):
    write(self, txn, *pair)
    os.kill(os.getpid(), signal.SIGKILL)
build('before')
LmdbStore._write = die
build('one')
"""


def test_a_put_that_was_killed_is_rolled_back_and_compiled_again(lab):
    assert lab.run(DIE_IN_PUT)[0] == -signal.SIGKILL
    before, one = keys(lab, "before", "one")
    assert set(kept(lab)) == {before}
    assert lab.build(["one", "before"]) == {"one": 1}
    assert set(kept(lab)) == {before, one}
    root = lab.cache / "v1"
    assert list((root / "open").iterdir()) == [] and not list(root.glob("store.corrupt-*"))


# Locks that are held too long.


TOGETHER = """
def together(*arguments):
    made = compile_spec(*arguments)
    while len(list(marks.glob("compile-one-*"))) < 2:
        time.sleep(0.002)
    return made

compiler.compile_spec = together
build("one")
"""


def test_two_who_waited_too_long_publish_the_same_kernel(lab):
    (key,) = keys(lab, "one")
    folder = lab.cache / "v1" / "locks"
    folder.mkdir(parents=True, mode=0o700)
    for path in (lab.cache, lab.cache / "v1"):
        path.chmod(0o700)
    with hold_file(folder / f"{key[0]:02x}.lock", 1):
        variables = {"KERNLIB_LOCK_TIMEOUT": "0.2", "KERNLIB_DEBUG": "1"}
        children = [lab.start(TOGETHER, **variables) for _ in range(2)]
        errors = [lab.errors_of(child) for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    assert all("kernlib wait " in text and "kernlib store " in text for text in errors)
    assert lab.compiles() == {"one": 2}
    assert [found.kernel for found in kept(lab).values()] == ["entry"]
    assert lab.build(["one"]) == {}


def test_who_waits_for_a_sleeper_compiles_privately_and_says_so(lab):
    owner = lab.start("build('one')", COMPILE_S="0.5")
    lab.wait_for("compile-one")
    owner.send_signal(signal.SIGSTOP)
    status, errors = lab.run("build('one')", KERNLIB_LOCK_TIMEOUT="0.5", KERNLIB_DEBUG="1")
    assert status == 0
    names = [line.split()[1] for line in errors.splitlines()]
    assert names == ["lookup", "wait", "compile", "store"]
    assert lab.compiles() == {"one": 2}
    owner.send_signal(signal.SIGCONT)
    lab.join([owner])
    assert lab.build(["one"]) == {}


# What importing does.

IMPORT = """
import sys
before = {*sys.modules}  # wheels of CUDA 12 leave cuda there
import kernlib
assert not {"torch", "cuda", "lmdb"} & {*sys.modules} - before, "by kernlib"
import kernlib.jit.store, kernlib.jit.layers, kernlib.jit.bundle, kernlib.jit.service
import kernlib.jit.compiler, kernlib.jit.tuning
from kernlib import events, settings
settings.current()
assert not {"torch", "cuda"} & {*sys.modules} - before, "by kernlib.jit"
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps and "libnvrtc" not in maps and ".mdb" not in maps
"""


def test_importing_does_no_cuda_no_folder_and_no_lmdb(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KERNLIB_")}
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    env = {**inherited, **own, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", IMPORT], env=env, cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == [home] and list(home.iterdir()) == []
