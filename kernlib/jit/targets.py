"""The compile targets: which one a device takes, and the limits of a block and a multiprocessor."""

from __future__ import annotations

from kernlib.errors import UnsupportedError

OLDEST = (8, 0)
# For a target with instructions that no other GPU has: the target without them.
PORTABLE = {"sm_90a": "sm_90"}

# Most shared memory of one block, in bytes (CUDA programming guide, technical specifications).
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,  # as PORTABLE
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_107": 227 * 1024,  # at least: cuda_occupancy.h of CUDA 13.5 has 328 KB a multiprocessor
    "sm_110": 227 * 1024,
    "sm_120": 99 * 1024,
    "sm_121": 99 * 1024,
}

# Limits of one multiprocessor. Its shared memory is that of the largest block and, besides, the
# RESERVED_SHARED_BYTES that the driver keeps for each block.
RESERVED_SHARED_BYTES = 1024
REGISTERS = 64 * 1024
RESIDENT_THREADS = {
    "sm_80": 2048,
    "sm_86": 1536,
    "sm_87": 1536,
    "sm_89": 1536,
    "sm_90": 2048,
    "sm_90a": 2048,
    "sm_100": 2048,
    "sm_103": 2048,
    "sm_107": 2048,  # as others of 10.x; no table of NVIDIA's has it
    "sm_110": 1536,
    "sm_120": 1536,
    "sm_121": 1536,
}

# Fewest and most multiprocessors of the GPUs on sale, for choices made where no device can be
# asked. A slice of a GPU (MIG) may have fewer.
MULTIPROCESSORS = {
    "sm_80": (56, 108),  # A30, A100
    "sm_86": (6, 84),  # RTX A400, A40
    "sm_87": (4, 16),  # Orin Nano 4GB, AGX Orin 64GB
    "sm_89": (14, 142),  # RTX 3050 A Laptop, L40
    "sm_90": (78, 132),  # H20, H100 SXM and H200
    "sm_90a": (78, 132),
    "sm_100": (148, 152),  # B200, GB200
    "sm_103": (148, 160),  # B300, all of a Blackwell Ultra
    "sm_107": (148, 224),  # Rubin as it was announced, and no fewer than B200
    "sm_110": (12, 20),  # Thor T4000, T5000
    "sm_120": (14, 188),  # RTX PRO 500 Laptop, RTX PRO 6000
    "sm_121": (48, 48),  # GB10
}


def resident_blocks(arch: str, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks of a kernel that one multiprocessor holds at a time; 0 for one that cannot run."""
    by_threads = RESIDENT_THREADS[arch] // threads
    warps = -(-threads // 32)
    # A warp gets registers in units of 256.
    by_registers = REGISTERS // (warps * -(-registers * 32 // 256) * 256)
    if shared_bytes > SHARED_BYTES[arch]:
        return 0
    room = SHARED_BYTES[arch] + RESERVED_SHARED_BYTES
    return min(by_threads, by_registers, room // (shared_bytes + RESERVED_SHARED_BYTES))


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
    if not isinstance(arch, str) or arch not in SHARED_BYTES:
        from kernlib.hints import spelling  # only errors need it

        hint = spelling.argument(arch, SHARED_BYTES) if isinstance(arch, str) else ""
        raise ValueError(f"arch must be one of {', '.join(SHARED_BYTES)}, got {arch!r}{hint}")
    return arch
