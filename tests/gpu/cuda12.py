"""Kernels of CUDA 12 from a bundle, on a GPU whose process compiles nothing.

    python -m tests.gpu.cuda12 compile FOLDER   anywhere with kernlib[cu12]: NVRTC 12 fills a bundle
    python -m tests.gpu.cuda12 run FOLDER       on an sm_90a GPU, with any driver from 525 on

The run looks kernels up as a process of CUDA 12 does, may compile nothing, and compares each call
with float64. Its versions of torch and of CUDA's bindings are those of the machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ARCH = "sm_90a"
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def calls() -> dict:
    """Name to (descriptor, shapes, dtype, arguments): each way that products and distances take."""
    import kernlib as kl

    points, few = ((1000, 64), (800, 64)), ((300, 3), (200, 3))
    activated = (kl.Bias(), kl.Gelu())
    made = {
        "laplace": (kl.laplace_l1(), points, {"bandwidth": 50.0}),
        "gaussian": (kl.gaussian(), points, {"bandwidth": 8.0}),
        "gaussian symmetric": (kl.gaussian(symmetric=True), points[:1], {"bandwidth": 8.0}),
        "matern": (kl.matern52(), few, {"bandwidth": 2.0}),
        "power": (kl.p_distance(), points, {"p": 1.3}),
        "polynomial": (kl.polynomial(), points, {"gamma": 0.1, "offset": 1.0}),
        "factor": (kl.KroneckerSparse(6, 64, 64, 1), ((128, 384), (6, 64, 64, 1)), {}),
        "interleaved": (kl.KroneckerSparse(2, 48, 40, 2), ((128, 160), (2, 48, 40, 2)), {}),
        "activated": (
            kl.KroneckerSparse(6, 64, 64, 1, epilogue=activated),
            ((128, 384), (6, 64, 64, 1)),
            {"bias": (384,)},
        ),
        "odd": (kl.KroneckerSparse(3, 5, 7, 3), ((50, 63), (3, 5, 7, 3)), {}),
    }
    kinds = {"float32": made, "float16": made, "bfloat16": made, "float64": list(made)[:6]}
    return {f"{name} {dtype}": (*made[name], dtype) for dtype in kinds for name in kinds[dtype]}


def tensors(shapes, arguments, dtype: str, device: str):
    """The operands, and the arguments whose shapes are given as operands too."""
    import torch

    def one(shape):
        kind = getattr(torch, dtype)
        if device == "meta":
            return torch.empty(shape, dtype=kind, device=device)
        return (torch.randn(shape, dtype=torch.float64) / 4).to(device, kind)

    given = {k: one(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    return tuple(one(shape) for shape in shapes), given


def compile_all(folder: Path) -> None:
    """Fill a bundle with the kernels of all calls. Raises RuntimeError unless NVRTC is of 12."""
    import kernlib as kl
    from kernlib.jit import toolchain

    if toolchain.cuda_major() != "12":
        raise RuntimeError(f"NVRTC {toolchain.nvrtc_version()} is not of CUDA 12: kernlib[cu12]")
    for descriptor, shapes, arguments, dtype in calls().values():
        operands, given = tensors(shapes, arguments, dtype, "meta")
        kl.compile(descriptor, archs=ARCH, specs=operands, **given)
    from kernlib.cli import main

    main(["cache", "export", str(folder)], standalone_mode=False)


def run_all(folder: Path) -> list[str]:
    """The calls whose results are wrong, on kernels of the bundle alone; says what each hit."""
    with tempfile.TemporaryDirectory(prefix="kernlib-cuda12-") as empty:
        os.environ |= {"KERNLIB_CACHE_DIR": f"{empty}:{folder}", "KERNLIB_ASSERT_CACHED": "1"}
        import torch

        import kernlib as kl
        from kernlib.jit import toolchain

        toolchain.nvrtc_version = lambda: toolchain.UNKNOWN_VERSION  # none, and bindings of 12
        toolchain.cuda_major = lambda: "12"
        hits, wrong = [], []
        kl.events.subscribe(lambda event: hits.append(event) if event.name == "hit" else None)
        torch.manual_seed(0)
        for name, (descriptor, shapes, arguments, dtype) in calls().items():
            operands, given = tensors(shapes, arguments, dtype, "cuda")
            found = kl.run_kernel(descriptor, *operands, **given).double().cpu()
            exact = {k: v.double().cpu() if torch.is_tensor(v) else v for k, v in given.items()}
            expected = kl.run_kernel(descriptor, *(x.double().cpu() for x in operands), **exact)
            error = ((found - expected).norm() / expected.norm()).item()
            wrong += [] if error <= TOLERANCE[dtype] else [f"{name}: error {error:.1e}"]
        served = {event.fields["where"] for event in hits}
        print(f"{len(calls())} calls, {len(hits)} kernels from {served}, wrong: {wrong or 'none'}")
        return wrong + ([] if served == {"bundle"} else [f"kernels came from {served}"])


if __name__ == "__main__":
    verb, target = sys.argv[1], Path(sys.argv[2]).resolve()
    sys.exit(bool(compile_all(target) if verb == "compile" else run_all(target)))
