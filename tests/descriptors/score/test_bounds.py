"""Windows that are found in masks, against what the masks say of each row and column."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernlib.descriptors.score.bounds import Window, structure
from kernlib.descriptors.score.grammar import parse_mask

KNOWN = {
    "col <= row": (None, 0),
    "row >= col": (None, 0),
    "col < row + 1": (None, 0),
    "row - 512 <= col": (512, None),
    "row - col <= 512": (512, None),
    "row - 64 <= col <= row + 32": (64, 32),
    "0 <= row - col < 128": (127, 0),
    "abs(row - col) <= 9": (9, 9),
    "8 > abs(col - row)": (7, 7),
    "row == col": (0, 0),
    "col <= row and row - col < 256": (255, 0),
    "(col <= row) & (row - 5 <= col) & (row - 7 <= col)": (5, 0),
    "-(col - row) >= 2": (None, -2),
    "row - 3000000000 <= col": (3000000000, None),
}


@pytest.mark.parametrize("text", KNOWN)
def test_windows_are_found(text):
    assert structure(parse_mask(text, ())) == Window(*KNOWN[text], None)


OTHERS = [
    "not col > row", "col < 4 or col <= row", "row + col < 9", "2 * row - col < 9", "row < 5",
    "abs(row - col) > 3", "abs(row - col - 1) < 3", "(row - col) % 2 == 0", "col != row", "1 < 2",
    "row < col + 0.5", "max(row - col, 2) < 5", "abs(row) < 4",
]  # fmt: skip


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_no_window_is_left(text):
    tree = parse_mask(text, ())
    assert structure(tree) == Window(None, None, tree)
    assert structure(parse_mask(f"col <= row and ({text})", ())) == Window(None, 0, tree)


LINES = st.sampled_from(
    ["row", "col", "row - 3", "col + 2", "row - col", "2 + row", "5", "0", "-4"]
)
SIGNS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
PARTS = st.tuples(LINES, SIGNS, LINES).map(" ".join) | st.tuples(
    st.sampled_from(["abs(row - col)", "abs(col - row)", "3"]), SIGNS,
    st.sampled_from(["2", "4", "abs(row - col)"]),
).map(" ".join)  # fmt: skip


@given(parts=st.lists(PARTS, min_size=1, max_size=3))
def test_a_window_and_its_rest_are_the_mask(parts):
    text = " and ".join(parts)
    found = structure(parse_mask(text, ()))
    for row in range(9):
        for col in range(9):
            wanted = eval(text, {"__builtins__": {}}, {"row": row, "col": col, "abs": abs})
            inside = found.left is None or row - found.left <= col
            inside = inside and (found.right is None or col <= row + found.right)
            if found.rest is None:
                assert inside == wanted
            else:
                assert inside or not wanted
