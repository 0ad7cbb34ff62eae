"""What attention is to be told beside a layout whose rule is finer than its blocks, of a BlockMask:
the texts of ``Layout.condition``, and the warning where it is not told."""

from __future__ import annotations

from kernlib.errors import warn

CONDITION = "what its mask_mod says as mask= or causal="
# Of blocks that hold more that is left out than columns behind the row.
BEYOND_CAUSAL = "what its mask_mod says as mask=, more than causal=True leaves out,"


def warn_of_whole_blocks(condition: str) -> None:
    """To an attention over a layout with such a ``condition`` that was told nothing, or of
    BEYOND_CAUSAL nothing but that it is causal."""
    warn(
        "blocks of the layout are seen whole, so rows see columns that its rule leaves out: "
        f"pass {condition} too, or copy.copy(layout) where whole blocks are meant"
    )
