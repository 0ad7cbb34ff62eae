"""What GPUs and the libraries on them do where one would guess otherwise: `python -m
benchmarks.behaviour` measures it, and writes a page of tables for each module of this folder into
`docs/results/behaviour/`.

A module has `TITLE` and `measure()`, which answers the tables of its page. Settings of the machine
are read and never set.
"""
