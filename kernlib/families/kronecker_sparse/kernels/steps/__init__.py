"""Launches before and behind others: packing, transposing, casts and sums."""
