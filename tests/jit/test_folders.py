"""Folders of a cache by the system's own hand: whose they are, how they are named, and full disks.
The processes may be no root."""

import os
import tempfile
from pathlib import Path

import pytest

TWICE = """
warnings.simplefilter("always")
compile_s = 0
for name in ("one", "two", "one"): build(name)
assert len(list(marks.glob("compile-*"))) == 2
"""
NOBODY, STRANGER = 65534, 54321  # the second is in no list of users; root may write everywhere


@pytest.fixture
def folder(lab):
    """A folder that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="kernlib-test-", dir="/tmp") as path:
        os.chmod(path, 0o755)
        lab.cache, lab.marks = Path(path, "cache"), Path(path, "marks")
        lab.marks.mkdir()
        lab.marks.chmod(0o777)
        yield Path(path)


# Python may be root's alone, so all is imported before, what opening a store does too.
IMPORTS = """
import email.parser, platformdirs.unix, kernlib.jit.bundle, lmdb, lmdb.verify, tempfile
key('one')
with tempfile.TemporaryDirectory() as place: lmdb.open(place).close()
"""


def become(number):
    """Code by which a process of root becomes another user, without rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    return IMPORTS + f"os.setgroups([]); os.setgid({number}); os.setuid({number}); os.chdir('/')\n"


def as_user(number, lab, code="", **variables):
    """Runs TWICE as a user without rights; what it warned of."""
    status, errors = lab.run(become(number) + code + TWICE, **variables)
    assert status == 0, errors
    assert errors.count("RuntimeWarning") == 1 and "KERNLIB_CACHE_DIR" in errors
    return errors


def test_a_folder_that_cannot_be_written(lab, folder):
    lab.cache.mkdir(mode=0o555)
    if os.geteuid() == 0:
        os.chown(lab.cache, NOBODY, NOBODY)
    assert "Permission denied" in as_user(NOBODY, lab)


def test_a_folder_of_somebody_else(lab, folder):
    lab.cache.mkdir(mode=0o755)
    assert "it belongs to user 0" in as_user(NOBODY, lab)


def test_a_user_without_a_home(lab, folder):
    code = "os.environ.pop('HOME'); os.environ.pop('XDG_CACHE_HOME', None)\n"
    assert "no home directory" in as_user(STRANGER, lab, code, KERNLIB_CACHE_DIR="")


def test_a_home_that_is_missing(lab):
    variables = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "", "KERNLIB_CACHE_DIR": ""}
    status, errors = lab.run(TWICE, **variables)
    assert status == 0, errors
    assert errors.count("RuntimeWarning") == 1 and "/proc/nowhere" in errors


def test_files_that_may_hold_nothing(lab):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000,) * 2)\n"
    status, errors = lab.run(limit + TWICE)
    assert status == 0, errors
    assert errors.count("RuntimeWarning") == 1 and "KERNLIB_CACHE_DIR" in errors


DISK = 'mount -t tmpfs -o mode=700,size="$1" tmpfs "$2" || exit 77; shift 2; exec "$@"'


@pytest.mark.parametrize("size", ["4k", "72k", "96k", "160k", "400k"])
def test_a_disk_that_is_full_from_the_start_or_becomes_so(lab, size):
    lab.cache.mkdir(mode=0o700)
    lab.before = ["unshare", "-m", "sh", "-c", DISK, "sh", size, str(lab.cache)]
    code = "warnings.simplefilter('always'); compile_s = 0\n" + (
        "for n in range(60): build(f'{n % 30}' + 'x' * 100)\nlayers.layers().store.close()"
    )
    status, errors = lab.run(code)
    if status == 77 or "unshare" in errors:
        pytest.skip("this user may mount nothing")
    assert status == 0, errors
    assert errors.count("RuntimeWarning") <= 1


# Names of folders: outside ASCII, outside UTF-8, relative.

BUNDLED = """
from kernlib.jit import bundle
build("one")
found = layers.layers()
assert found.kind == "store", found
folder = pathlib.Path(os.fsdecode(os.environb[b"KERNLIB_CACHE_DIR"]))
bundle.write(folder / "bundle", bundle.collect(found.store.items()))
assert [key for key, _ in bundle.open_bundle(folder / "bundle").items()]
"""


@pytest.mark.parametrize("name", ["käche".encode(), b"k\xff\xfe", "核".encode()])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_folder_of_any_name_in_any_locale(lab, tmp_path, name, locale):
    variables = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = os.fsdecode(bytes(tmp_path / "a") + name)
    assert lab.run(BUNDLED, KERNLIB_CACHE_DIR=folder, **variables) == (0, "")


RELATIVE = """
warnings.simplefilter("ignore")
from kernlib import settings
here, how = pathlib.Path(arguments[0]), arguments[1]
os.chdir(here)
build("one")
(here / "elsewhere").mkdir()
os.chdir(here / "elsewhere")
service.forget()
settings.reset() if how == "anew" else None
if how == "fork":
    pid = os.fork()
    if pid:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
build("two")
store, locks = layers.layers()[:2]
root = here / ("elsewhere/cache" if how == "anew" else "cache")
assert store.directory == root and locks._directory == root / "v1" / "locks", store.directory
os._exit(0 if len(os.listdir(root / "v1" / "locks")) > 0 else 1)
"""


@pytest.mark.parametrize("how", ["same", "fork", "anew"])
def test_a_relative_folder_is_where_the_process_was(lab, tmp_path, how):
    found = lab.run(RELATIVE, str(tmp_path), how, KERNLIB_CACHE_DIR="cache:no-bundle")
    assert found == (0, "")


REMOVED = """
os.chdir(arguments[0])
os.rmdir(arguments[0])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    build("one"), build("one")
texts = [str(warning.message) for warning in caught]
assert len(texts) == 2 and "kernels are kept in memory" in texts[0], texts
assert "passed over" in texts[1]
assert layers.layers().kind == "memory"
"""


def test_a_relative_folder_of_a_working_directory_that_was_removed(lab, tmp_path):
    (tmp_path / "gone").mkdir()
    found = lab.run(REMOVED, str(tmp_path / "gone"), KERNLIB_CACHE_DIR="cache:bundle")
    assert found == (0, "") and lab.compiles() == {"one": 1}


# Caches with kernels that the process cannot write.

SERVED = """
warnings.simplefilter("always")
for name in ("one", "new", "one"): build(name)
"""
# Whose the folder is, how its rights are changed, and the warning that NOBODY gets.
UNWRITABLE = {
    "root's": (0, "go+rX", "written", "it belongs to user 0"),
    "one's own": (NOBODY, "a-w", "written", "Permission denied"),
    "one's own file": (NOBODY, "a-w v1/store/data.mdb", "written", "Permission denied"),
    "root's, who shares it not": (0, "go-rwx", "used", "Permission denied"),
    "a third user's": (STRANGER, "go+rX", "used", "it belongs to user 54321"),
}


def change(lab, owner, rights):
    mode, _, below = rights.partition(" ")
    os.system(f"chown -R {owner}:{owner} {lab.cache}; chmod -R {mode} {lab.cache / below}")


def served(lab, code, use, reason):
    """Builds a kernel that the cache has and one that it has not; one warning names bundles."""
    lab.clear()
    data = lab.cache / "v1" / "store" / "data.mdb"
    changed = data.stat().st_mtime_ns
    status, errors = lab.run(code + SERVED)
    if status == 77 or "unshare" in errors:
        pytest.skip("this user may mount nothing")
    assert status == 0, errors
    assert errors.count("RuntimeWarning") == 1 and reason in errors, errors
    assert f"cannot be {use} (" in errors and "kernlib cache export" in errors
    assert lab.compiles() == ({"new": 1} if use == "written" else {"one": 1, "new": 1})
    assert data.stat().st_mtime_ns == changed


@pytest.mark.few(len(UNWRITABLE))
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_cache_that_one_may_not_write_is_read_where_that_is_safe(lab, folder, kind):
    owner, rights, use, reason = UNWRITABLE[kind]
    code = become(NOBODY)
    lab.build(["one"])
    change(lab, owner, rights)
    served(lab, code, use, reason)


def test_without_its_gate_a_cache_of_root_is_not_read_where_root_may_write_it(lab, folder):
    code = become(NOBODY)
    lab.build(["one"])
    (lab.cache / "v1" / "store.lock").unlink()
    change(lab, 0, "go+rX")
    served(lab, code, "used", "it belongs to user 0")


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; shift; exec "$@"'


@pytest.mark.parametrize("gate", ["with a gate", "without"])
@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_cache_of_root_on_a_read_only_mount_is_read_by_everybody(lab, folder, user, gate):
    code = become(user)
    lab.build(["one"])
    change(lab, 0, "go+rX")
    if gate == "without":
        (lab.cache / "v1" / "store.lock").unlink()
    lab.before = ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", str(lab.cache)]
    served(lab, code, "written", "Read-only file system" if user == 0 else "it belongs to user 0")


def test_root_writes_a_folder_that_was_made_read_only(lab, folder):
    if os.geteuid() != 0:
        pytest.skip("rights bind whoever is not root")
    lab.build(["one"])
    change(lab, 0, "a-w")
    assert lab.run(SERVED + "assert layers.layers().kind == 'store'") == (0, "")
