"""Whether what kernlib chooses by itself is the fastest way: of its own kernels and formats, and of
torch."""
