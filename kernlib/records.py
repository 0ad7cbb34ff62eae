"""``NamedTuple`` as that of typing, in half the time: a first call makes some 50 such classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from collections import namedtuple

    class _Record(type):
        """What makes a class of named fields of a class body."""

        def __new__(kind, name: str, bases: tuple, body: dict):
            if not bases:
                return super().__new__(kind, name, bases, body)
            fields = body.get("__annotations__", {})
            defaults = [body.pop(field) for field in fields if field in body]
            module = body.pop("__module__")
            made = namedtuple(name, fields, defaults=defaults, module=module)
            for key, value in body.items():
                if key not in ("__qualname__", "__dict__", "__weakref__"):
                    setattr(made, key, value)
            made.__qualname__, made.__new__.__annotations__ = body["__qualname__"], {**fields}
            return made

    class NamedTuple(metaclass=_Record):
        """A tuple whose fields have names. The types of the fields are not looked at."""
