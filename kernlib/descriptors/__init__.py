"""What to compute: frozen dataclasses of plain values that know nothing of torch, CUDA or files."""
