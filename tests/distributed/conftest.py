"""Pools of processes that tests of this folder share."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Three processes over gloo."""
    processes = Pool(3)
    yield processes
    processes.close()
