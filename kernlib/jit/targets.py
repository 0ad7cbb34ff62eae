"""Which architecture a device takes, and what a block may use there."""

from __future__ import annotations

from kernlib.errors import UnsupportedError

OLDEST = (8, 0)

# Most shared memory of one block, in bytes (CUDA programming guide, technical specifications).
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_110": 227 * 1024,
    "sm_120": 99 * 1024,
    "sm_121": 99 * 1024,
}

# Multiprocessors of the largest product, for choices made where no device can be asked.
MULTIPROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_87": 16,
    "sm_89": 142,
    "sm_90a": 132,
    "sm_100": 148,
    "sm_103": 160,
    "sm_110": 20,
    "sm_120": 188,
    "sm_121": 48,
}


def arch_of(capability: tuple[int, int], name: str = "this device") -> str:
    """The target for a compute capability: 9.0 takes ``sm_90a``, all others the plain one.

    Raises UnsupportedError below 8.0 and for a device newer than the table.
    """
    if capability < OLDEST:
        major, minor = capability
        raise UnsupportedError(
            f"{name} has compute capability {major}.{minor}; kernlib needs 8.0 (Ampere) or later. "
            "CPU tensors run everywhere."
        )
    arch = "sm_90a" if capability == (9, 0) else "sm_{}{}".format(*capability)
    if arch not in SHARED_BYTES:
        raise UnsupportedError(
            f"{name} is {arch}, which this version of kernlib does not know; it knows "
            f"{', '.join(SHARED_BYTES)}. CPU tensors run everywhere."
        )
    return arch


def check_arch(arch: str) -> str:
    """``arch`` itself. Raises ValueError, listing the targets, for one that is not known."""
    if arch not in SHARED_BYTES:
        raise ValueError(f"arch must be one of {', '.join(SHARED_BYTES)}, got {arch!r}")
    return arch
