"""The service: first calls in fresh processes, the hot call, compile time and size of a cubin.

``python -m benchmarks.service --json benchmarks/results/h200/service.json``; the compile and cubin
cases need no GPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import kernlib as kl
from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session, attempt, note
from benchmarks.service import first_use
from benchmarks.service.processes import child

SOURCE = '#include "pairwise/direct/direct.cuh"'
FIRST_SHAPE = (1000, 1000, 1024)  # small enough that the kernel itself takes 0.1 ms
HEADS, ROWS, HOT_ROWS, HEAD_DIM, BLOCK = 8, 2048, 512, 128, 128  # of attention
PROCESSES = 3
BATCHES, CALLS = 10, 2000
COMPILES = 3
COMPILE_MUST_MS, COMPILE_MUST_CPU_MS = 400.0, 1200.0  # beside a GPU, and on two CPU cores
CUBIN_MUST = 100 * 1024
CPU_ARCH = "sm_90a"


# First calls. Their own caches would hide what NVRTC and the driver cost.


def _distance() -> tuple[Callable, Callable]:
    m, n, k = FIRST_SHAPE
    a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    descriptor, run_kernel = kl.l1_distance(), kl.run_kernel

    def check(result: torch.Tensor) -> None:
        wanted = torch.cdist(a[:8], b, p=1.0)
        torch.testing.assert_close(result[:8], wanted, rtol=1e-4, atol=1e-2)

    return lambda: run_kernel(descriptor, a, b), check


def heads(rows: int, device: str = "cuda") -> tuple[list[torch.Tensor], kl.blocksparse.Layout]:
    """q, k and v, and a layout that stores the lower half of their blocks."""
    shape = 1, HEADS, rows, HEAD_DIM
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3)]
    stored = torch.ones(rows // BLOCK, rows // BLOCK, dtype=torch.bool).tril()
    return tensors, kl.blocksparse.Layout(stored, BLOCK, device=device)


def _attention(device: str = "cuda") -> tuple[Callable, Callable]:
    tensors, layout = heads(ROWS, device)
    attention = kl.blocksparse.attention

    def check(result: torch.Tensor) -> None:
        mask = layout.mask().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask)
        torch.testing.assert_close(result, wanted, rtol=5e-2, atol=2e-2)

    return lambda: attention(*tensors, layout), check


# What the rows are named by, to what makes a call and what looks at its result.
FIRST: dict[str, Callable] = {"": _distance, "attention ": _attention}
MUSTS = {"cold": {"": 1000.0, "attention ": 500.0}, "cached": {"": 10.0, "attention ": 10.0}}


def first_call(cached: bool, name: str = "") -> None:
    """Print, as JSON, the milliseconds from the call to a synchronised result in this process.

    CUDA is up, tensors are there, kernlib is imported. ``cached``: cuda.core is imported as well
    and the call must not load NVRTC.
    """
    call, check = FIRST[name]()
    warm = torch.empty(FIRST_SHAPE[:2], device="cuda").fill_(0)
    if cached:
        import cuda.core  # noqa: F401
    torch.cuda.synchronize()
    before = nvrtc_is_loaded()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    after = nvrtc_is_loaded()
    check(result)
    print(json.dumps({"ms": milliseconds, "before": before, "after": after, "n": warm.numel()}))


def nvrtc_is_loaded() -> bool:
    """Whether libnvrtc is mapped into this process."""
    return "libnvrtc" in Path("/proc/self/maps").read_text()


def first_call_elsewhere(cached: bool, cache_dir: str, name: str = "") -> float:
    """What :func:`first_call` measures in a fresh process. Raises RuntimeError when it fails."""
    code = f"from benchmarks.service.run import first_call; first_call({cached}, {name!r})"
    report = child(code, cache_dir, KERNLIB_ASSERT_CACHED="1" if cached else "0")
    if cached and report["before"]:
        note("something other than kernlib has loaded NVRTC before the cached first call")
    elif cached and report["after"]:
        raise RuntimeError("a call that found its kernel in the cache has loaded NVRTC")
    return report["ms"]


def first_calls(name: str, session: Session) -> dict[str, float]:
    """Medians of the cold and the cached first call, measured in pairs once a session."""
    if f"{name}cold" not in session.ours:
        pairs = [_pair(name) for _ in range(1 if session.quick else PROCESSES)]
        session.ours[f"{name}cold"] = statistics.median(cold for cold, _ in pairs)
        session.ours[f"{name}cached"] = statistics.median(cached for _, cached in pairs)
    return session.ours


def _pair(name: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="kernlib-bench-") as directory:
        cold, cached = (first_call_elsewhere(again, directory, name) for again in (False, True))
    return cold, cached


def first_call_row(name: str, kind: str, session: Session) -> Row:
    found = first_calls(name, session)[f"{name}{kind}"]
    return Row(f"first call {name}{kind}", "ms", found, must=MUSTS[kind][name])


# First uses, imports counted.


def first_use_row(name: str, kind: str, session: Session) -> Row:
    """The median of first uses in fresh processes, by an empty cache or by the one that filled.

    The first call of ``torch.linalg.cholesky`` stands beside a use that makes it, and the target
    holds for the difference."""
    known = session.ours
    processes = 1 if session.quick else PROCESSES
    if f"{name} {kind}" not in known:
        pairs = [_uses(name) for _ in range(processes)]
        for place, each in enumerate(first_use.KINDS):
            known[f"{name} {each}"] = statistics.median(pair[place] for pair in pairs)
    row = Row(f"first use {name} {kind}", "ms", known[f"{name} {kind}"])
    row.must = first_use.MUSTS[kind]
    if name in first_use.WITH_CHOLESKY:
        if "cholesky" not in known:
            known["cholesky"] = statistics.median(_first_cholesky() for _ in range(processes))
        row.rivals["cholesky"] = known["cholesky"]
        row.must += known["cholesky"]
    return row


def _uses(name: str) -> list[float]:
    code = f"from benchmarks.service.first_use import use; use({name!r})"
    with tempfile.TemporaryDirectory(prefix="kernlib-bench-") as directory:
        return [child(code, directory)["ms"] for _ in first_use.KINDS]


def _first_cholesky() -> float:
    code = "from benchmarks.service.first_use import use_cholesky; use_cholesky()"
    with tempfile.TemporaryDirectory(prefix="kernlib-bench-") as directory:
        return child(code, directory)["ms"]


# The hot call.


def host_us(call: Callable[[], object], synchronize: Callable[[], None], quick=False) -> float:
    """Microseconds of host time a call: the median of batches, each on an empty queue."""
    batches, calls = (3, CALLS // 4) if quick else (BATCHES, CALLS)
    for _ in range(100):
        call()
    return statistics.median(_batch_us(call, synchronize, calls) for _ in range(batches))


def _batch_us(call: Callable, synchronize: Callable, calls: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    synchronize()
    return elapsed / calls * 1e6


def hot_call(session: Session) -> Row:
    a, b = torch.randn(64, 8, device="cuda"), torch.randn(64, 8, device="cuda")
    out = torch.empty(64, 64, device="cuda")
    descriptor, run_kernel = kl.l1_distance(), kl.run_kernel

    def timed(call: Callable) -> float:
        return host_us(call, torch.cuda.synchronize, session.quick)

    ours = timed(lambda: run_kernel(descriptor, a, b, out=out))
    error = ((out - torch.cdist(a.double(), b.double(), p=1.0)).norm() / out.norm()).item()
    row = Row("hot call 64x64x8", "us", ours, error=error, must=12.0)
    x, y = torch.zeros(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    others = {
        "torch": lambda: timed(lambda: torch.cdist(a, b, p=1.0)),
        "torch add_": lambda: timed(lambda: x.add_(y)),
        "triton": lambda: timed(triton_add(x, y)),
    }
    for name, work in others.items():
        found = attempt(name, row.case, work)
        if found is not None:
            row.rivals[name] = found
    return row


def hot_attention(session: Session) -> Row:
    """Of a call whose kernel is done before the next one's host time is over."""
    tensors, layout = heads(HOT_ROWS)
    attention = kl.blocksparse.attention
    ours = host_us(lambda: attention(*tensors, layout), torch.cuda.synchronize, session.quick)
    return Row("hot call attention", "us", ours, must=25.0)


def hot_attention_step(session: Session) -> Row:
    """The same with the gradients by q, k and v, which ``torch.autograd.grad`` asks for."""
    tensors, layout = heads(HOT_ROWS)
    attention, grad = kl.blocksparse.attention, torch.randn_like(tensors[0])
    for t in tensors:
        t.requires_grad_()

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(*tensors, layout), tensors, grad)

    ours = host_us(step, torch.cuda.synchronize, session.quick)
    return Row("hot step attention", "us", ours)


def triton_add(x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    """A launch of the smallest useful Triton kernel, with its arguments at hand."""
    global tl  # where Triton looks up the names of a kernel
    import triton
    import triton.language as tl

    @triton.jit
    def add(x_pointer, y_pointer, count, BLOCK: tl.constexpr):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(x_pointer + index, inside) + tl.load(y_pointer + index, inside)
        tl.store(x_pointer + index, value, inside)

    count = x.numel()
    launch = add[(triton.cdiv(count, 1024),)]
    return lambda: launch(x, y, count, BLOCK=1024)


# Compiles.


def spec_and_arch(p: float) -> tuple[object, str]:
    """The kernel of ``cdist p=... 30000x30000x1024 fp32``, for this GPU or for CPU_ARCH."""
    from kernlib import ahead
    from kernlib.jit import targets

    points = torch.empty(30000, 1024, device="meta")
    cuda = torch.cuda.is_available()
    arch = targets.arch_of(torch.cuda.get_device_capability()) if cuda else CPU_ARCH
    one = p == 1
    descriptor, arguments = (kl.l1_distance(), {}) if one else (kl.p_distance(), {"p": p})
    return ahead.specs(descriptor, arch, (points, points), arguments)[0], arch


def compile_row(p: float, session: Session) -> Row:
    from kernlib.jit.compiler import compile_spec

    spec, arch = spec_and_arch(p)
    compile_spec(spec, arch)  # loads NVRTC

    def timed() -> float:
        start = time.perf_counter()
        compile_spec(spec, arch)
        return (time.perf_counter() - start) * 1e3

    must = COMPILE_MUST_MS if torch.cuda.is_available() else COMPILE_MUST_CPU_MS
    times = [timed() for _ in range(1 if session.quick else COMPILES)]
    return Row(f"compile p={p:g}", "ms", statistics.median(times), must=must)


def cubin_row(p: float, session: Session) -> Row:
    from kernlib.jit.compiler import compile_spec

    size = len(compile_spec(*spec_and_arch(p)).cubin)
    return Row(f"cubin p={p:g}", "bytes", size, must=CUBIN_MUST)


def cases() -> list[Case]:
    return [
        *[
            Case(f"first call {name}{kind}", lambda s, n=name, k=kind: first_call_row(n, k, s))
            for name in FIRST
            for kind in MUSTS
        ],
        *[
            Case(f"first use {name} {kind}", lambda s, n=name, k=kind: first_use_row(n, k, s))
            for name in first_use.OPERATIONS
            for kind in first_use.KINDS
        ],
        Case("hot call 64x64x8", hot_call),
        Case("hot call attention", hot_attention),
        Case("hot step attention", hot_attention_step),
        *[Case(f"compile p={p:g}", lambda s, p=p: compile_row(p, s)) for p in (1, 1.3)],
        *[Case(f"cubin p={p:g}", lambda s, p=p: cubin_row(p, s)) for p in (1, 1.3)],
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return harness.main("service", cases(), SOURCE, argv)
