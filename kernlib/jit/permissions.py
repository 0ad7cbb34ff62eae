"""Folders and files that only their owner may write, on file systems that LMDB can rely on."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

BUNDLE = "kernels.mdb"  # the one file of a bundle, which is no place for a store
NOTE_BYTES = 1 << 10
LOCK_FILE_BYTES = 64 << 10  # 64 bytes a reader: room for 1022

# NOTE: LMDB maps a lock file that processes share, and relies on flock. Neither works across hosts.
_NETWORK = {"nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda"}
_NETWORK |= {"9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs"}  # of the host of a virtual machine
_NETWORK |= {"lustre", "lustre_lite", "gpfs", "beegfs", "beegfs_nodev", "fhgfs", "ceph", "panfs"}
_NETWORK |= {"glusterfs", "pvfs2", "orangefs", "wekafs", "dvs", "scratchfs", "cvfs", "stornext"}
_NETWORK |= {"gfs", "gfs2", "ocfs2", "vxfs", "acfs", "quobyte", "mfs", "xtreemfs", "hdfs"}
# Of FUSE those on a local disk; any other may be of another host, and plain "fuse" does not tell.
_LOCAL_FUSE = {"fuse.bindfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.encfs", "fuse.cryfs"}
_LOCAL_FUSE |= {"fuse.mergerfs", "fuse.ntfs-3g", "fuse.unionfs", "fuse.securefs", "fuse.fuse2fs"}
_MOUNTS = Path("/proc/self/mountinfo")


def identity(path: Path) -> tuple[int, int]:
    """Device and inode of a file, which tell it from others. Raises OSError."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def is_there(path: Path) -> bool:
    """Whether there is something at a path. Raises PermissionError where that cannot be seen."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_mounted_read_only(path: Path) -> bool:
    """Whether nobody can write a file by this mount. Raises OSError."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def reserve_lock_file(path: Path) -> None:
    """Write a new lock file full of zeros. On a full disk this raises ENOSPC, where LMDB would
    write to a hole of its map and die of SIGBUS.

    NOTE: never call this while LMDB has the file open in this process: closing any descriptor of it
    drops LMDB's locks.
    """
    if path.exists() and path.stat().st_size:  # an interrupt may have left an empty one
        return
    fd = open_plain(path, os.O_WRONLY | os.O_CREAT)
    try:
        if os.write(fd, bytes(LOCK_FILE_BYTES)) < LOCK_FILE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make the folder and those above it where they are missing. Only their owner may use them,
    whatever the umask says. Raises OSError."""
    missing = [folder]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not path.is_dir():
                raise
        else:
            os.chmod(path, 0o700)


def make_private(folder: Path) -> None:
    """Make the folder. Raises OSError, and PermissionError for one that another user may write:
    cubins are executable code."""
    make_folder(folder)
    refuse_others(folder, os.stat(folder), (os.geteuid(),))


def refuse_others(path: Path, found: os.stat_result, owners: tuple[int, ...]) -> None:
    """Raises PermissionError for a file or folder that users other than ``owners`` may write."""
    if found.st_uid not in owners:
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", str(path))
    if found.st_mode & 0o022:
        reason = f"others may write it (mode {found.st_mode & 0o777:o}), chmod go-w would do"
        raise PermissionError(errno.EPERM, reason, str(path))


def refuse_odd(path: Path, owners: tuple[int, ...] | None = None) -> None:
    """Raises OSError for what is no plain file (opening a pipe would wait for ever), and for a file
    that users other than ``owners`` (by default the current one) may write. A path where nothing is
    passes."""
    if os.path.lexists(path):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        refuse_others(path, status, owners or (os.geteuid(),))


def open_plain(path: Path, flags: int) -> int:
    """A descriptor of a plain file. Only the owner may use a file that is made. Raises OSError,
    also for a symbolic link and for a pipe, which would wait for its other end."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        if flags & os.O_CREAT:
            os.fchmod(fd, 0o600)  # whatever the umask says
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_note(path: Path) -> str:
    """The text of a small file. Raises OSError and UnicodeDecodeError."""
    fd = open_plain(path, os.O_RDONLY)
    try:
        return os.read(fd, NOTE_BYTES).decode()
    finally:
        os.close(fd)


def write_note(path: Path, text: str) -> None:
    """Write a small file, in place of what it held. Raises OSError."""
    fd = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def refuse_bundle(folder: Path) -> None:
    """Raises OSError for a folder that holds a bundle, where a store would be written."""
    if (folder / BUNDLE).exists():
        reason = "it is a bundle, which is read only: name it behind a colon"
        raise OSError(errno.EINVAL, reason, str(folder))


def refuse_network(folder: Path) -> None:
    """Raises OSError for a folder on a network file system."""
    kind = mount_kind(os.path.realpath(folder))
    fuse = kind == "fuse" or kind.startswith("fuse.")
    if kind in _NETWORK or (fuse and kind not in _LOCAL_FUSE):
        raise OSError(errno.ENOTSUP, f"it is on a network file system ({kind})", str(folder))


def mount_kind(path: str) -> str:
    """The type of the file system that a path is on; "" where the system lists no mounts."""
    best, kind = "", ""
    mounts = os.fsdecode(_MOUNTS.read_bytes()) if _MOUNTS.exists() else ""
    for line in mounts.split("\n")[:-1]:
        fields, _, source = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two on one point, the later hides the earlier
            best, kind = point, source.split()[0]
    return kind
