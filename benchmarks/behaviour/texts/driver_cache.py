"""Texts of the page on loading."""

TEXTS = {
    "cache": """
The guess: 20 ms to compile PTX once, 2 ms from the driver's cache, cubins leave no trace there.
Seen: so it is: 13.7 and 0.12 ms for one kernel, 744 and 4.5 for 256; cubins load in 0.09 and 2.4
ms. A comment more in the PTX compiles anew. `CUDA_CACHE_DISABLE=1` compiles at each load, twice in
one process too. `CUDA_CACHE_MAXSIZE` below what is there drops nothing, and still reads. A folder
that cannot be made costs 13 ms at every start, in silence. What follows: who ships PTX pays for it
in the first process of every machine. kernlib keeps cubins in LMDB, of which the driver's cache
sees nothing.
""",
    "lazy": """
The guess: with lazy loading a load takes the same for 1 kernel and for 256. Seen: it does not: 0.04
ms and 2.3, 9 us for each kernel, and 0.9 more for the first function; eager loading takes twice
that. The first launch takes 0.07 ms in a new process, later ones 0.02. Memory of the device shows
in steps of 2 MiB. What follows: lazy loading saves half of a load, not all of it; one file with all
kernels makes each process pay for all. kernlib's cubins hold one kernel each, 0.1 ms to load.
""",
    "memory": """
One file of 588 KiB with 256 kernels, loaded again and again. The guess: the same file twice takes
its memory twice, and unloading gives it back. Seen: eager: 0.9 MiB a load, all of it back after
unloading. Lazy: 16 loads with a function each show nothing, all 256 functions of one show 2 MiB.
Nothing is shared between two loads: the functions are 16 different ones. What follows: memory of
lazily loaded code is that of the functions in use. kernlib loads a cubin once for a process and
device, asks for its one function, and never unloads it.
""",
    "attributes": """
Dynamic shared memory that a kernel is permitted. The guess: what is set on the CUfunction is seen
through its CUkernel, and the reverse, but not in a second load of the file. Seen: nothing is seen
anywhere else. cuFuncSetAttribute does not change cuKernelGetAttribute, nor does
cuKernelSetAttribute change the CUfunction that was asked of it before. What follows: set it on the
handle that is launched; a permission on the other one does not count for it. kernlib sets it on the
CUfunction, once at loading, and launches just that.
""",
    "unloading": """
Calls in one thread while a kernel of 50 ms runs on the device. The guess: loading does not wait,
unloading does. Seen: both wait. cuLibraryLoadData returns at once with lazy loading, but asking for
the first function of a file waits until the device is idle, as cuModuleLoadData does and eager
loading; a second function of that file does not wait. What follows: the first call of each kernel
in a process waits for all work before it, and if that work waits for a launch to come, for ever.
kernlib's first call of a kernel does so too, from the cache or not; `prepare` does it beforehand.
""",
    "errors": """
The guess: a cubin for another GPU, or no cubin at all, is refused by the load. Seen: with lazy
loading cuLibraryLoadData takes everything but a file that is cut: GPUs of other numbers, LTO-IR,
text, 4096 zeros. The error comes with the first function: NO_BINARY_FOR_GPU for sm_80, sm_89 and
sm_100, INVALID_PTX for PTX of newer GPUs, INVALID_IMAGE for what is no code. A cubin with one
constant changed loads and runs: the driver keeps no checksum. What follows: success of a load says
nothing. kernlib asks for the function at once, takes these errors for a damaged cache, compiles
anew, and checks a crc of each entry before the driver sees it.
""",
}
TEXTS = {name: text.strip() for name, text in TEXTS.items()}
