"""One module a family: ``python -m benchmarks.pairwise --json FILE``; see CONTRIBUTING.md."""
