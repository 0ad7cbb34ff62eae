"""CUDA graphs on an H200: what a replay costs, what a change of parameters costs, whether replays
overlap, and what memory captured graphs hold."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import torch

from benchmarks.behaviour.compiled import Kernel, checked, parameters
from benchmarks.behaviour.page import Table
from kernlib.runtime import driver

TITLE = "CUDA graphs"
SOURCE = """
extern "C" __global__ void small(int* out, int value) { if (threadIdx.x == 0) out[0] += value; }
extern "C" __global__ void early(int* out, int value) {
    launch_dependents();
    wait_for_prerequisites();
    if (threadIdx.x == 0) out[0] += value;
}
extern "C" __global__ void busy(int* out, int cycles) {
    long long begin = clock64();
    for (int i = 0; i < 100000000 && clock64() - begin < cycles; ++i) {}
    if (threadIdx.x == 0) out[blockIdx.x] = cycles;
}
"""
SIZES = (1, 10, 100, 1000)


def _launcher(kernel: Kernel, stream, *arguments, overlaps=False, grid=1, threads=32) -> Callable:
    """A launch with little work in Python."""
    from cuda.bindings.driver import cuLaunchKernelEx

    config = driver.launch_config((grid, 1, 1, threads, 1, 1, 0), stream.cuda_stream, overlaps)
    function, values = kernel.function, parameters(arguments)
    return lambda: cuLaunchKernelEx(config, function, values, 0)


class Graph:
    """What a function launches on a stream, captured and instantiated by the driver."""

    def __init__(self, record: Callable, stream, instantiate: bool = True):
        from cuda.bindings import driver as cuda

        self.cuda, self.stream = cuda, cuda.CUstream(stream.cuda_stream)
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        begin = time.perf_counter()
        checked(cuda.cuStreamBeginCapture(self.stream, mode))
        try:
            record()
        finally:
            self.graph = checked(cuda.cuStreamEndCapture(self.stream))
        self.capture = time.perf_counter() - begin
        self.executable, begin = None, time.perf_counter()
        if instantiate:
            self.executable = checked(cuda.cuGraphInstantiate(self.graph, 0))
        self.instantiation = time.perf_counter() - begin

    def replay(self, stream=None):
        stream = self.stream if stream is None else self.cuda.CUstream(stream.cuda_stream)
        checked(self.cuda.cuGraphLaunch(self.executable, stream))

    def nodes(self) -> list:
        count = checked(self.cuda.cuGraphGetNodes(self.graph, 0))[1]
        return checked(self.cuda.cuGraphGetNodes(self.graph, count))[0]

    def close(self):
        if self.executable is not None:
            checked(self.cuda.cuGraphExecDestroy(self.executable))
        checked(self.cuda.cuGraphDestroy(self.graph))


def _repeat(call: Callable, count: int) -> Callable:
    def record():
        for _ in range(count):
            call()

    return record


def _host(call: Callable, count: int = 20) -> float:
    """Median microseconds on the host, each after the GPU has ended."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def _gpu(call: Callable, stream, count: int = 10) -> float:
    """Median microseconds between events around single calls, of calls back to back."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    call()
    for event in events[:-1]:
        event.record(stream)
        call()
    events[-1].record(stream)
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3


class _Bench:
    """Kernels, a stream and a place to write to."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.small, self.early, self.busy = (
            Kernel(SOURCE, entry) for entry in ("small", "early", "busy")
        )
        self.out = torch.zeros(1024, dtype=torch.int32, device="cuda")
        self.one = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()

    def chain(self, count: int, kernel: Kernel | None = None, overlaps=False, out=None) -> Graph:
        target = self.out if out is None else out
        call = _launcher(kernel or self.small, self.stream, target, 1, overlaps=overlaps)
        return Graph(_repeat(call, count), self.stream)


@cache
def _bench() -> _Bench:
    return _Bench()


def _replays() -> Table:
    it = _bench()
    rows = []
    for count in SIZES:
        call = _launcher(it.small, it.stream, it.out, 1)
        eager = _gpu(_repeat(call, count), it.stream)
        with torch.cuda.stream(it.stream):
            of_torch = _gpu(_repeat(lambda: it.one.add_(1), count), it.stream)
        graph = it.chain(count)
        host, replay = _host(graph.replay), _gpu(graph.replay, it.stream)
        overlapping = it.chain(count, it.early, overlaps=True)
        early = _gpu(overlapping.replay, it.stream)
        graph.close()
        overlapping.close()
        rows.append([count, *(f"{x:.1f}" for x in (eager, of_torch, replay, host, early))])
    columns = (
        *("kernels", "launched by the driver", "`add_` of torch", "a replay", "its host time"),
        "a replay with programmatic launches",
    )
    return Table(
        "Microseconds of dependent small kernels",
        (
            "The guess: a graph saves launches on the host alone. Seen: a kernel of a replay "
            "takes 0.78 us, where one launched into a full queue takes 1.5 (next table). The "
            "launches here are bound by the host, in Python. Programmatic launches are "
            "captured as such, and take 0.50. A replay costs the host 2 us at 100 nodes and 5 "
            "at 1000. What follows: capture pays for GPU-bound chains of short kernels as "
            "well."
        ),
        columns,
        rows,
    )


def _gaps() -> Table:
    """Small kernels behind a long one, so that all are in the queue before they begin."""
    it = _bench()
    count, rows = 400, []
    long = _launcher(it.busy, it.stream, it.out, 6_000_000)
    for name, kernel, overlaps in (
        ("stream", it.small, False),
        ("stream, programmatic launches", it.small, True),
        ("stream, programmatic launches with an early trigger", it.early, True),
    ):
        call = _launcher(kernel, it.stream, it.out, 1, overlaps=overlaps)
        rows.append((name, f"{_behind(it, long, _repeat(call, count)) / count:.2f}"))
        graph = Graph(_repeat(call, count), it.stream)
        graph.replay()
        rows.append((name.replace("stream", "graph"),
                     f"{_behind(it, long, graph.replay) / count:.2f}"))  # fmt: skip
        graph.close()
    forked = Graph(lambda: _fork(it, count), it.stream)
    forked.replay()
    rows.append(("graph, 8 branches", f"{_behind(it, long, forked.replay) / count:.2f}"))
    forked.close()
    return Table(
        "Microseconds from kernel to kernel",
        (
            "All are in the queue before the first begins. The guess: a programmatic launch "
            "helps only a kernel that triggers early. Seen: without any trigger in the kernel "
            "it halves the time from kernel to kernel in a stream, to that of a graph. With a "
            "trigger as the first instruction and in a graph it is a third. Independent "
            "branches overlap up to four times. What follows: short kernels in a row are "
            "launched programmatically, with or without something to do before they wait."
        ),
        ("launches", "a kernel"),
        rows,
    )


def _fork(it: _Bench, count: int):
    """The launches on eight streams, which fork from the capturing one and join it."""
    begin, streams = torch.cuda.Event(), [torch.cuda.Stream() for _ in range(8)]
    begin.record(it.stream)
    for stream in streams:
        stream.wait_event(begin)
        _repeat(_launcher(it.small, stream, it.out, 1), count // 8)()
        it.stream.wait_stream(stream)


def _behind(it: _Bench, long: Callable, call: Callable) -> float:
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        long()
        begin.record(it.stream)
        call()
        end.record(it.stream)
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def _changes() -> Table:
    it = _bench()
    rows = []
    other = torch.zeros(1024, dtype=torch.int32, device="cuda")
    source, static = (torch.zeros(1 << 18, device="cuda") for _ in range(2))
    for count in (10, 100, 1000):
        graph, changed = it.chain(count), it.chain(count, out=other)
        cuda = graph.cuda
        first = _host(graph.replay, 1)
        later = _host(graph.replay)
        again = it.chain(count)
        upload = _host(partial(cuda.cuGraphUpload, again.executable, again.stream), 1)
        uploaded = _host(again.replay, 1)
        update = _host(partial(cuda.cuGraphExecUpdate, graph.executable, changed.graph), 5)
        pairs = [
            (node, checked(cuda.cuGraphKernelNodeGetParams(theirs)))
            for node, theirs in zip(graph.nodes(), changed.nodes(), strict=True)
        ]

        def set_all(pairs=pairs, executable=graph.executable, cuda=cuda):
            for node, params in pairs:
                checked(cuda.cuGraphExecKernelNodeSetParams(executable, node, params))

        sets = _host(set_all, 5)
        before = int(other[0])
        behind = _host(graph.replay, 1)
        torch.cuda.synchronize()
        works = int(other[0]) - before == count
        with torch.cuda.stream(it.stream):
            copy = _host(lambda: static.copy_(source))
        fields = (graph.capture * 1e6, graph.instantiation * 1e6, first, later, upload, uploaded)
        fields += (update, sets / count, behind)
        rows.append([count, *(f"{x:.1f}" for x in fields), "yes" if works else "no", f"{copy:.1f}"])
        for each in (graph, changed, again):
            each.close()
    columns = (
        *("nodes", "capture", "instantiate", "first replay", "later replay", "upload"),
        *("first replay behind it", "update of all by a graph", "new parameters, a node"),
        *("replay behind them", "they take effect", "`copy_` of 1 MiB"),
    )
    return Table(
        "Microseconds of the host for changes",
        (
            "The guess: new pointers cost about a capture, so they are copied into static "
            "buffers. Seen: an update of 1000 nodes by another captured graph takes 50 us, 35 "
            "times less than instantiating it, and new parameters of one node 0.6 us. "
            "Instantiating and the first replay take as long as the capture each; an upload "
            "moves the latter elsewhere. Behind an update a replay is slower once, by 60 us "
            "at 1000 nodes. What follows: to follow new pointers or shapes of one topology, "
            "capture again, update the executable graph, and instantiate nothing. copy_ of 1 "
            "MiB is as long as the parameters of ten nodes."
        ),
        columns,
        rows,
    )


def _overlaps() -> Table:
    """Replays on two streams, of kernels that occupy one SM for a while."""
    it = _bench()
    second = torch.cuda.Stream()
    other = torch.zeros(1024, dtype=torch.int32, device="cuda")
    call = _launcher(it.busy, it.stream, it.out, 400_000)
    record = _repeat(call, 4)
    graph, twin = Graph(record, it.stream), Graph(record, it.stream)
    clone = checked(graph.cuda.cuGraphInstantiate(graph.graph, 0))
    beside = _launcher(it.busy, second, other, 400_000)

    def timed(*calls: Callable) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for each in calls:
                each()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6

    handle = graph.cuda.CUstream(second.cuda_stream)
    cases = {
        "one replay": (graph.replay,),
        "the same executable graph twice on one stream": (graph.replay, graph.replay),
        "the same executable graph on two streams": (graph.replay, lambda: graph.replay(second)),
        "another executable of the same graph": (
            graph.replay,
            lambda: checked(graph.cuda.cuGraphLaunch(clone, handle)),
        ),
        "another graph": (graph.replay, lambda: twin.replay(second)),
        "launches without a graph on two streams": (record, _repeat(beside, 4)),
    }
    rows = [(name, f"{timed(*calls):.0f}") for name, calls in cases.items()]
    return Table(
        "Microseconds of two replays",
        (
            "Of 4 kernels in a row that occupy one multiprocessor each. The guess: launches "
            "into two streams overlap. Seen: two replays of one executable graph never do, on "
            "whichever streams. Two executables of the same graph do, as another graph or "
            "plain launches would. What follows: a server that replays one graph from several "
            "streams runs them one after the other. It takes a capture with buffers of its own for "
            "each stream: two executables of one graph write to the same addresses."
        ),
        ("replays", "until both have ended"),
        rows,
    )


def _memory() -> Table:
    it = _bench()
    rows = []
    for count, copies in ((1, 64), (10, 64), (100, 64), (1000, 16)):
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        graphs = [it.chain(count) for _ in range(copies)]
        instantiated = torch.cuda.mem_get_info()[0]
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        left = torch.cuda.mem_get_info()[0]
        for graph in graphs:
            graph.close()
        torch.cuda.synchronize()
        gone = torch.cuda.mem_get_info()[0]
        again = [it.chain(count) for _ in range(copies)]
        sizes = [free - x for x in (instantiated, left, gone, torch.cuda.mem_get_info()[0])]
        for graph in again:
            graph.close()
        rows.append([f"{copies} of {count} nodes", *(f"{size / 2**20:.1f}" for size in sizes)])
    columns = ("graphs", "instantiated", "replayed once", "destroyed", "as many again")
    return Table(
        "MiB of device memory",
        (
            "The guess: memory of a graph is freed with it. Seen: 1.3 to 1.6 KiB a node, in "
            "steps of 2 MiB and more, which stay with the driver when graphs are destroyed, "
            "and serve the next ones. Graphs of few nodes fit into what is there. What "
            "follows: a thousand captured shapes of a hundred nodes take 140 MB that neither "
            "torch nor its empty_cache() shows."
        ),
        columns,
        rows,
    )


def _pools() -> Table:
    """What graphs of torch reserve for ten chained intermediates of 64 MiB."""
    _bench()
    x = torch.zeros(1 << 24, device="cuda")
    torch.cuda.empty_cache()
    steps: list[tuple[str, float]] = []
    start = torch.cuda.memory_reserved()

    def note(name: str):
        steps.append((name, f"{(torch.cuda.memory_reserved() - start) / 2**20:.0f}"))

    def chain():
        y = x
        for _ in range(10):
            y = y + 1
        return y

    def captured(**options):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **options):
            y = chain()
        return graph, y

    first = captured()
    note("a graph of 10 intermediates of 64 MiB")
    second = captured()
    note("a second graph of the same")
    third = captured(pool=first[0].pool())
    note("a third graph in the pool of the first")
    del second
    note("the second deleted")
    torch.cuda.empty_cache()
    note("the cache emptied")
    chain()
    note("the same without a graph, beside them")
    del first, third
    torch.cuda.empty_cache()
    note("all deleted, the cache emptied")
    return Table(
        "MiB that torch reserves",
        (
            "The guess: ten chained intermediates of 64 MiB take 640. Seen: 128, as buffers "
            "are used again within a capture. A second capture takes as much again, as pools "
            "are not shared. In the pool of the first it takes its result alone. A deleted "
            "graph returns nothing before empty_cache(), and calls outside of graphs cannot "
            "use its pool meanwhile. What follows: graphs that never run at once are captured "
            "with pool=, the largest first."
        ),
        ("after", "reserved"),
        steps,
    )


TABLES = (_replays, _gaps, _changes, _overlaps, _memory, _pools)


def measure() -> list[Table]:
    """The tables of the page."""
    return [table() for table in TABLES]
