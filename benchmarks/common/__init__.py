"""What the benchmarks of all families share, in reading order ``timing`` and ``harness``."""
