"""The arguments of a conversion, checked."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from kernlib.families.sparse.formats.encoding import check_columns
from kernlib.families.sparse.formats.registry import check_format, with_values
from kernlib.families.sparse.prune import check_density, check_per
from kernlib.nn.linears import checked_match


class Options(NamedTuple):
    """How weights are pruned and compressed: see :func:`kernlib.checkpoints.convert`."""

    density: float | None = None
    per: str = "matrix"
    format: str = "auto"
    columns: int = 1
    values: str | None = None
    match: re.Pattern | None = None
    fuse: bool = True

    @classmethod
    def checked(cls, *, density, per, format, columns, values, match, fuse=True) -> Options:
        """Raises TypeError and ValueError that name the argument."""
        if density is not None:
            check_density(density)
        check_per(per)
        check_format(format)
        check_columns(columns)
        if not isinstance(fuse, bool):
            raise TypeError(f"fuse must be a bool, got {fuse!r}")
        if match is not None and not isinstance(match, (str, re.Pattern)):
            raise TypeError(f"match must be None or a regular expression, got {match!r}")
        format = with_values(format, values)
        return cls(density, per, format, columns, values, checked_match(match), fuse)

    def takes(self, name: str) -> bool:
        """Whether the layer of a name is to be compressed."""
        return self.match is None or self.match.search(name) is not None

    def text(self) -> str:
        """All of it as JSON, the same for equal options."""
        pattern = None if self.match is None else self.match.pattern
        return json.dumps({**self._asdict(), "match": pattern}, sort_keys=True)
