"""Named tuples of kernlib behave as those of typing."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing

import pytest

from kernlib.records import NamedTuple


class Mine(NamedTuple):
    """Two numbers."""

    a: int
    b: str = "b"

    @property
    def both(self) -> str:
        return f"{self.a}{self.b}"

    @classmethod
    def of(cls, a: int) -> Mine:
        return cls(a, "made")


class Theirs(typing.NamedTuple):
    """Two numbers."""

    a: int
    b: str = "b"


def test_a_record_is_a_named_tuple():
    one = Mine(1)
    assert (one, one.both, Mine.of(2)) == ((1, "b"), "1b", (2, "made"))
    assert one._replace(a=3) == Mine(a=3) and isinstance(one, tuple)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert typing.get_type_hints(Mine) == typing.get_type_hints(Theirs)
    for name in ("_fields", "_field_defaults", "__doc__", "__module__"):
        assert getattr(Mine, name) == getattr(Theirs, name)
    assert [*inspect.signature(Mine).parameters] == [*inspect.signature(Theirs).parameters]
    assert (Mine.__bases__, Mine.__qualname__) == ((tuple,), "Mine")
    assert repr(one) == "Mine(a=1, b='b')"
    with pytest.raises(TypeError):
        Mine()
    with pytest.raises(AttributeError):
        one.a = 2
