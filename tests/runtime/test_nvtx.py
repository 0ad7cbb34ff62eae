"""NVTX ranges around loads and launches: where they are asked for, and nothing where not."""

import pytest
import torch

import kernlib as kl
from kernlib import settings
from kernlib.runtime import driver
from tests.support import fakes


@pytest.fixture
def ranges(monkeypatch):
    """What is pushed and popped, launches between."""
    noted = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", noted.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: noted.append("end"))
    return noted


def call():
    a, b, out = (fakes.on_gpu(*shape) for shape in ((5, 3), (7, 3), (5, 7)))
    kl.run_kernel(kl.laplace_l1(), a, b, out=out, bandwidth=1.0)


def test_loads_and_launches_lie_in_ranges(gpus, ranges):
    with settings.override(nvtx=True):
        call()
        call()
    described = gpus.launches[0].what
    assert ranges == [f"kernlib load {described}", "end", *(described, "end") * 2]


def test_there_are_none_unless_asked_for(gpus, ranges):
    call()
    launch = object()
    assert driver.ranged(launch, "name") is launch
    assert len(gpus.launches) == 1 and not ranges


def test_a_launch_that_fails_ends_its_range(ranges):
    with settings.override(nvtx=True), pytest.raises(KeyError):
        driver.ranged({}.popitem, "name")()
    assert ranges == ["name", "end"]


def test_the_variable():
    assert settings.Settings.read({"KERNLIB_NVTX": "1"}).nvtx
    assert not settings.Settings.read({}).nvtx
