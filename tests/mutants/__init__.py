"""Small faults, put into a copy of the tree one at a time, and whether the tests find them.

``faults/*.toml`` has the faults, ``reach`` says which tests reach which lines, ``run`` applies the
faults and makes the table. None of it is part of a run of the tests::

    python -m tests.mutants.reach                 # once: the map, with `pip install coverage`
    python -m tests.mutants.run --suite fast      # goes on where it was interrupted
    python -m tests.mutants.run --table           # what was found, by which suite, how fast

Whoever mends a bug adds the fault that puts it back.
"""
