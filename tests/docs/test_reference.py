"""Docstrings of all public objects are complete, and their examples run."""

import pytest

from tests.support import reference


@pytest.mark.few(1000)
@pytest.mark.parametrize("module", reference.MODULES)
def test_docstrings_are_complete(module):
    assert not [text for _, text in reference.faults((module,))]


@pytest.mark.few(1000)
@pytest.mark.parametrize("module", reference.MODULES)
def test_examples_run(module):
    assert not reference.failures((module,))


def test_what_a_docstring_lacks_is_said():
    def silent(x):
        pass

    def scaled(x, factor):
        """``x`` times a number."""

    class Shape:
        """A shape of ``sides``. Raises ValueError for none.

        >>> Shape(3).area
        """

        def __init__(self, sides):
            pass

        @property
        def area(self):
            """In square metres."""

        def turned(self, angle):
            """Turned by some degrees."""

    for value in (silent, scaled, Shape, Shape.area.fget, Shape.turned):
        value.__module__ = "kernlib"

    def lacks(value, name="f", owner=None):
        return [*reference.lacks(reference.Public("kernlib", name, value, owner))]

    assert lacks(silent) == ["a docstring"]
    assert lacks(scaled) == ["its parameters factor", 'its errors ("Raises ...")', "an example"]
    assert lacks(Shape) == lacks(Shape.area, "Shape.area", Shape) == []
    example = "an example, or one of its class with .turned"
    assert lacks(Shape.turned, "Shape.turned", Shape) == ["its parameters angle", example]
