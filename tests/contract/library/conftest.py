"""Settings of the suite."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No program of another test."""
    yield
    torch._dynamo.reset()
