"""Matrices made from their entries: those of CSR, and of the sparse layouts of torch."""
