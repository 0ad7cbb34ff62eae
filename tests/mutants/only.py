"""Plugin of pytest: of what is collected only the functions that ``KERNLIB_MUTANT_TESTS``, a file,
lists, in its order. Named on the command line, those of which a suite has no case are errors."""

from __future__ import annotations

import os
from pathlib import Path

LIST = "KERNLIB_MUTANT_TESTS"


def pytest_collection_modifyitems(config, items):
    names = Path(os.environ[LIST]).read_text().splitlines()
    order = {name: place for place, name in enumerate(names)}
    functions = {item: item.nodeid.split("[")[0] for item in items}
    places = {item: order.get(item.nodeid, order.get(functions[item])) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if places[item] is None])
    items[:] = sorted((item for item in items if places[item] is not None), key=places.get)
