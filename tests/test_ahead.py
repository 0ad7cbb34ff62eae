"""Compiling for GPUs that are not here."""

import pytest
import torch

import kernlib as kl

X = torch.empty(1000, 64, device="meta")


@pytest.fixture
def built(monkeypatch):
    """(arch, description) of each kernel that would be compiled."""
    found = []
    monkeypatch.setattr(
        "kernlib.jit.service.build", lambda spec, arch: found.append((arch, spec.description))
    )
    return found


def test_one_tensor_one_arch_and_one_descriptor_need_no_tuples(built):
    kl.compile(kl.gaussian(symmetric=True), archs="sm_80", specs=X, bandwidth=1.0)
    kl.compile([kl.gaussian(symmetric=True)], archs=["sm_80"], specs=(X,), bandwidth=1.0)
    assert len(built) == 2 and built[0] == built[1] and built[0][0] == "sm_80"


def test_all_variants_of_every_arch(built):
    kl.compile(kl.l1_distance(), archs=("sm_80", "sm_90a"), dtypes=torch.float32)
    assert len(built) == 2 * 36


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"archs": "sm_75", "specs": (X, X)}, ValueError, "arch must be one of .*sm_75"),
        ({"bandwidth": 1.0}, TypeError, "bandwidth: arguments of a call need its specs"),
        ({"specs": (X, X, X)}, TypeError, "specs must be the tensors of one call, got 3"),
        ({"specs": (X, 3)}, TypeError, "specs must be the tensors"),
        ({"dtypes": torch.int8}, TypeError, "dtypes: pairwise has no kernels for torch.int8"),
    ],
)
def test_what_does_not_fit_is_said(built, arguments, error, message):
    with pytest.raises(error, match=message):
        kl.compile(kl.l1_distance(), **arguments)
    assert built == []


def test_debug_shows_the_events(capsys):
    kl.compile(kl.cauchy(), specs=(X, X), bandwidth=1.0, debug=True)
    assert "kernlib compile" in capsys.readouterr().err
