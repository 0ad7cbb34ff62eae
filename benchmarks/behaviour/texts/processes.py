"""Texts of the page on processes."""

TEXTS = {
    "short": """
Median of 3, in us, and largest. The guess: beside kernels of 30 ms of another process all that the
device does waits for its time slice, copies from the host too. Seen: an empty kernel, a fill and a
copy within the device wait 2.4 ms, whether the other kernels take 30 ms or 20 us; copies from the
host, a wait for nothing and cuMemAlloc do not wait at all. Beside another stream of the same
process nothing waits, but for the first cuMemFree, which waits for all kernels (240 ms). What
follows: a busy second process makes a short call 200 times as long, not twice. kernlib frees
nothing by the driver: memory is torch's, whose allocator keeps it.
""",
    "slices": """
Kernels of one block that wait by globaltimer. The guess: two processes take twice as long. Seen:
kernels of 20 us do, those of 1 ms take half as long again, and those of 10 ms nearly no longer.
That is no sharing: the timer goes on while a process is not running, so a kernel that waits for 10
ms ends in time though it ran in every second slice only. What follows: a kernel that waits by
globaltimer or `torch.cuda._sleep` is no stand-in for work when processes share a GPU, and time
limits inside of kernels count other processes' slices. kernlib has no kernel that reads a clock.
""",
    "bare": """
The guess: 300 to 500 MB, .2 to .4 s. Seen: 525 MiB besides its 64, 0.16 s, and a sixth more while
the kernels of another process run. A context costs the same without torch. What follows: eight
workers of a GPU hold 4 GB before their first tensor. kernlib makes no context of its own: it
retains the primary one that torch uses, so a process has one.
""",
    "starting": """
The guess: importing torch takes longest, the context .2 to .4 s, a first call of kernlib from a
filled cache 10 to 30 ms. Seen: the import takes 3.6 s, the context 160 ms, a first product of each
dtype 100 to 120, a first SDPA 750, a first solve 125. The first call of kernlib takes 164 ms, 2 of
them for its import; another kernel takes 4. What follows: first calls of torch hide in every "time
to first result". kernlib's own imports modules, opens the cache and loads the driver's bindings;
later kernels cost what loading them costs.
""",
    "before": """
What the parent did before it forked, and what its child then gets. The guess: import and CPU calls
are harmless, all that asks the driver is not. Seen: so it is, and `torch.cuda.is_available()`
belongs to the second kind: though `is_initialized()` stays False, the child is refused.
`device_count()` and `manual_seed` are harmless. After a pinned tensor, a generator, a stream or
cuInit the child fails by "initialization error" or "driver initialization failed", which do not say
fork. What follows: ask `device_count() > 0` before a fork. kernlib's calls of CPU tensors and
`kernlib.compile` ask neither, so workers may be forked after them.
""",
    "after": """
The guess: new tensors raise torch's message on forks, work on inherited ones "initialization
error", the driver NOT_INITIALIZED. Seen: just that. `is_available()` is still True and
`memory_allocated()` 0 in the child. What follows: a worker that is given a CUDA tensor fails with
an error that names no fork. kernlib's calls of inherited CUDA tensors raise torch's message with
its advice, since they ask for the current device first, also for a kernel that was loaded before;
calls of CPU tensors work, and the parent is unharmed.
""",
}
TEXTS = {name: text.strip() for name, text in TEXTS.items()}
