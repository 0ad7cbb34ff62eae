"""A process that forks, in whatever state it is: both sides go on, and nobody hangs."""

import pytest

FORK = """
from tests.jit.process_cases import forked, succeeds

def meanwhile(name):
    thread = threading.Thread(target=build, args=(name,))
    thread.start()
    return thread
"""


def runs(lab, code, **variables):
    """The code, in a process with FORK at hand, must succeed; how often each was compiled."""
    status, errors = lab.run(FORK + code, **variables)
    assert status == 0 and errors == "", errors
    return lab.compiles()


def test_import_then_fork(lab):
    code = """
children = [forked(lambda: [build(name) for name in ("one", "two")]) for _ in range(3)]
[build(name) for name in ("two", "three")]
[succeeds(child) for child in children]
"""
    assert runs(lab, code) == {"one": 1, "two": 1, "three": 1}


def test_open_then_fork_and_fork_again(lab):
    code = """
def child(name, below):
    build("before")
    build(name)
    if below:
        succeeds(forked(lambda: child(below[0], below[1:])))
    build("after")

build("before")
pid = forked(lambda: child("child", ["grandchild", "great-grandchild"]))
build("parent")
succeeds(pid)
[build(name) for name in ("before", "after", "parent", "child", "grandchild", "great-grandchild")]
"""
    names = ("before", "after", "parent", "child", "grandchild", "great")
    assert runs(lab, code) == dict.fromkeys(names, 1)


def test_a_fork_waits_for_the_compile_of_another_thread(lab):
    code = """
def noted(*arguments):
    made = compile_spec(*arguments)
    mark("ended")
    return made

compiler.compile_spec = noted
thread = meanwhile("one")
wait_for("compile-one-*")
pid = forked(lambda: [build(name) for name in ("one", "two")])
assert any(marks.glob("ended-*"))
build("one"), build("three")
thread.join()
succeeds(pid)
"""
    assert runs(lab, code, COMPILE_S="0.5") == {"one": 1, "two": 1, "three": 1}


def test_a_fork_does_not_wait_for_ever(lab):
    code = """
from kernlib.jit import locks
locks.FORK_WAIT_S = 0.2
thread = threading.Thread(target=build, args=("stuck",), daemon=True)
thread.start()
wait_for("compile-stuck-*")
compile_s = 0
pid = forked(lambda: build("one"))
succeeds(pid)
build("one")
mark("done")
os._exit(0)
"""
    assert runs(lab, code, COMPILE_S="60") == {"stuck": 1, "one": 1}


def test_a_thread_may_fork_in_the_middle_of_its_own_compile(lab):
    code = """
from kernlib.jit import locks
locks.FORK_WAIT_S = 600

def compile_and_fork(spec, arch):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    succeeds(pid)
    return compile_spec(spec, arch)

compiler.compile_spec = compile_and_fork
build("one")
"""
    assert runs(lab, code) == {"one": 1}


def test_a_fork_while_another_thread_opens_the_store(lab):
    code = """
from kernlib.jit.store import LmdbStore
real = LmdbStore.open
LmdbStore.open = lambda self: (mark("opening"), time.sleep(0.3), real(self))
thread = meanwhile("one")
wait_for("opening-*")
pid = forked(lambda: [build(name) for name in ("one", "two")])
thread.join()
succeeds(pid)
"""
    assert runs(lab, code) == {"one": 1, "two": 1}


BUNDLE = """
from kernlib import settings
from kernlib.jit import bundle
build("one")
bundle.write(marks / "bundle", bundle.collect(layers.layers().store.items()))
os.environ["KERNLIB_CACHE_DIR"] = f"{marks / 'user'}:{marks / 'bundle'}"
settings.reset()
"""


def test_a_fork_while_another_thread_opens_a_bundle(lab):
    code = """
real = bundle.lmdb.open
def slow(path, *arguments, **options):
    if b"kernels.mdb" in path:
        mark("opening")
        time.sleep(0.3)
    return real(path, *arguments, **options)
bundle.lmdb.open = slow
thread = meanwhile("one")
wait_for("opening-*")
pid = forked(lambda: build("one"))
thread.join()
succeeds(pid)
build("one")
"""
    assert runs(lab, BUNDLE + code) == {"one": 1}


def test_a_fork_while_another_thread_opens_an_inherited_bundle(lab):
    """LMDB would refuse the file to a child that knows nothing of the environment opened for it."""
    code = """
build("one")
real = bundle.lmdb.open
def slow(path, *arguments, **options):
    made = real(path, *arguments, **options)
    if b"kernels.mdb" in path:
        mark("opened")
        time.sleep(0.3)
    return made

def child():
    bundle.lmdb.open = slow
    thread = meanwhile("one")
    wait_for("opened-*")
    pid = forked(lambda: build("one"))
    thread.join()
    succeeds(pid)

succeeds(forked(child))
"""
    assert runs(lab, BUNDLE + code) == {"one": 1}


def test_a_fork_while_another_thread_reads_a_bundle(lab):
    """The child would wait, as it closes its copy, for the end of a read that nobody ends there."""
    code = """
import fcntl, select
build("one")
(found,) = layers.layers().bundles
real, (pipe, copy) = found._env, os.pipe()
fcntl.fcntl(copy, fcntl.F_SETPIPE_SZ, 4096)

class Slow:
    def __getattr__(self, name):
        return getattr(real, name)

    def begin(self):
        real.copyfd(copy)  # an operation for as long as nobody reads the pipe
        return real.begin()

def drain():
    forking.wait()
    time.sleep(0.3)  # a fork that waits for no read has come and gone
    while True:
        os.read(pipe, 4096)

found._env, forking = Slow(), threading.Event()
threading.Thread(target=drain, daemon=True).start()
os.register_at_fork(before=forking.set)
thread = meanwhile("one")
select.select([pipe], [], [])
pid = forked(lambda: build("one"))
thread.join()
succeeds(pid)
build("one")
"""
    assert runs(lab, BUNDLE + code) == {"one": 1}


def test_forks_by_two_threads_while_two_others_build(lab):
    code = """
stop, failed = threading.Event(), []

def work(first):
    number = 0
    while not stop.is_set():
        build(f"{first}.{number}")
        number += 1

def fork_often(first):
    try:
        for number in range(8):
            succeeds(forked(lambda: [build(f"{first}.{number}"), build("a.0"), build("b.0")]))
    except Exception as error:
        failed.append(error)

build("a.0"), build("b.0")
workers = [threading.Thread(target=work, args=(name,)) for name in "ab"]
forkers = [threading.Thread(target=fork_often, args=(name,)) for name in "cd"]
[thread.start() for thread in workers + forkers]
[thread.join() for thread in forkers]
stop.set()
[thread.join() for thread in workers]
assert not failed, failed
"""
    compiles = runs(lab, code, COMPILE_S="0.001")
    assert set(compiles.values()) == {1} and len(compiles) >= 18


def test_a_child_forked_while_nvrtc_works_can_compile(lab):
    """NVRTC's own locks are copied as they are: without the wait 8 of 12 children hung."""
    code = """
SOURCE = '#include "common/types.cuh"\\n#include "common/math.cuh"\\n'

def real(name):
    source = SOURCE + 'extern "C" __global__ void entry() {}' + f" // {name}"
    service.build(KernelSpec("test", source, "entry", 32, description=name), "sm_90a")

compiler.compile_spec = nvrtc
stop = threading.Event()

def work(first):
    number = 0
    while not stop.is_set():
        real(f"{first}.{number}")
        number += 1

threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in "ab"]
[thread.start() for thread in threads]
for number in range(5):  # the first of them while cuda.core is imported
    time.sleep(0.03)
    succeeds(forked(lambda: real(f"c.{number}")))
stop.set()
[thread.join() for thread in threads]
"""
    assert runs(lab, code) == {}


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_pool_of_processes_finds_what_its_parent_has_built(lab, method):
    code = f"""
import multiprocessing
made = build("one")
os.environ["KERNLIB_ASSERT_CACHED"] = "1"  # for those who do not inherit the compiler
context = multiprocessing.get_context({method!r})
with context.Pool(2) as pool:
    found = pool.starmap(service.build, [(spec("one"), "sm_90a")] * 4, 1)
    pool.close()
    pool.join()
assert [one.cubin for one in found] == [made.cubin] * 4
build("two")
"""
    assert runs(lab, code) == {"one": 1, "two": 1}
