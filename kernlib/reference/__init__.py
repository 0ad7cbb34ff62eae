"""The same operations in plain PyTorch: the CPU backend, and the oracle of every test."""
