"""Predecessors' names over kernlib's kernels, so that their users change one import."""
