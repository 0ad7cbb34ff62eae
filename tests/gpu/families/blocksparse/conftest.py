"""What the tests of block-sparse kernels see of calls."""

import pytest

from kernlib import events


@pytest.fixture
def kinds():
    """The kinds of kernels that a test launches, one for each launch."""
    found = []
    stop = events.subscribe(
        lambda event: event.name == "launch" and found.append(event.description.split()[1])
    )
    yield found
    stop()
