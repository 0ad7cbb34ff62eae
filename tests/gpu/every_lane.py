"""Kernels as racecheck understands them."""

from __future__ import annotations

from kernlib.jit import sources


def let_every_lane_arrive(changes: dict[str, tuple[tuple[str, str], ...]]) -> None:
    """At the barriers of kernels compiled from now on, in the place of a warp's first lane behind a
    __syncwarp: racecheck of CUDA 13.0 takes an arrival for that of its own lane alone, and what the
    others read or wrote before for a race. ``changes`` are texts and what takes their place, once
    each, by header; of counts that barriers begin with among them."""
    read = sources.read

    def changed(name: str) -> str:
        text = read(name)
        for old, new in changes.get(name, ()):
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        return text

    sources.read = changed


BY_WARP = {
    "common/hopper.cuh": (("if (threadIdx.x % 32 == 0) barrier_arrive(", "barrier_arrive("),),
}
