"""Texts of the page on clocks, caches and latencies."""

TEXTS = {
    "timers": """
The guess: globaltimer steps by 32 ns, as events do, and clock64 of two multiprocessors means
nothing together. Seen: so it is; globaltimer of 132 multiprocessors agrees within 128 ns, clock64
is 38 million clocks apart. Two adjacent events are 1.2 us apart, and a kernel that runs for 5 us
takes 8.4 us between its events. What follows: a single short kernel is not timed by events, and
stamps of several multiprocessors need globaltimer. kernlib's benchmarks replay a graph of many
calls below 1 ms, and divide.
""",
    "launches": """
The guess: an event costs the host a third of a launch, an empty kernel of a graph 1.3 us. Seen:
record of an event takes 4.9 us, as long as a launch; a launch by cuda.core takes 3.7 us and
cuLaunchKernelEx of cuda.bindings 4.8; a kernel of a graph takes 0.7 us. From the end of a kernel to
the next are 1.6 us in a stream, 0.7 in a graph, and 0.34 in both where launches may overlap. What
follows: bounds of many short kernels are these gaps. kernlib lets kernels of its products overlap;
its small cdist costs the host 15 us, torch's 10.
""",
    "reads": """
The guess: twice the speed of memory up to 25 MB, the half of L2 that is near, and less above. Seen:
no step at 25 MB. Repeated reads rise to 6.5 TB/s at 40 MB, 1.5 times memory's 4.3, fall between 45
and 50 MB, and are memory's at 60. What was just written is read from L2 as well, up to 45 MB. A
first read of 100 MB reaches 3 TB/s, one of 1 GB 4.3, as a read takes microseconds to begin and end.
What follows: a benchmark must rotate more than 60 MB; kernlib's rotate 400 MB, and sweep L2 by 256
MB before a call that is timed alone.
""",
    "loads": """
The guess: 345 MHz when idle, and less than 1700 MHz after a second of tensor cores. Seen: 1980 MHz
when idle. After 10 and 100 ms of bfloat16 products the clock is still 1957 MHz; after a second it
is 1605, and the product takes 1.53 ms in place of 1.38. A copy never lowers it. nvidia-smi lags: in
the middle of 0.9 s of products it says 117 W, the power of before. What follows: a product that is
timed for less than some tenths of a second is 10 % faster than the same in training. Compare
kernels in turn. kernlib's benchmarks time rivals in the same run.
""",
    "power": """
The guess: zeros 15 to 35 % faster than normal numbers, one constant as fast as zeros, small
integers in between, no change in float32. Seen: just that: 791, 790, 758 and 677 TFLOP/s, at 405,
442, 661 and 700 to 750 W; sorting the rows gives normal numbers 13 % more. float32 stays at 51,
with 390 to 670 W. Not guessed: tensor cores run at 1755 MHz with zeros, far from the limit of
power, where copies and float32 run at 1980. What follows: random normal numbers are the only fair
input, and kernlib's benchmarks take them; zeros or ones flatter a product by a sixth.
""",
    "copies": """
The guess: copies are fastest at 4 GB. Seen: in a graph a copy of 256 MiB runs at 4.2 TB/s and one
of 1 GiB at 2.8; the same copy in no graph runs at 4.2 in both, and a kernel at 3.35. In L2 (16 MiB)
5.5. Where source and target are one byte off alike a copy loses a third; where they are one byte
apart it loses four fifths. What follows: whoever captures copies of a GiB pays half as much again;
and a floor for "bytes read and written" depends on who copies. kernlib's floors take 4.3 TB/s, that
of a copy in no graph.
""",
}
TEXTS = {name: text.strip() for name, text in TEXTS.items()}
