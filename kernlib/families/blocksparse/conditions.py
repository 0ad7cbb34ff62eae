"""The arguments that attention needs for a layout of a BlockMask whose rule is finer than its
blocks: the texts of ``Layout.condition``, and the warning for a call without them."""

from __future__ import annotations

from kernlib.errors import warn

CONDITION = "what its mask_mod says as mask= or causal="
# For blocks that leave out more than columns behind the row.
BEYOND_CAUSAL = "what its mask_mod says as mask=, more than causal=True leaves out,"


def warn_of_whole_blocks(condition: str) -> None:
    """To an attention over a layout with such a ``condition`` that was told nothing, or of
    BEYOND_CAUSAL nothing but that it is causal."""
    warn(
        "blocks of the layout are seen whole, so rows see columns that its rule leaves out: "
        f"pass {condition} too, or copy.copy(layout) where whole blocks are meant"
    )
