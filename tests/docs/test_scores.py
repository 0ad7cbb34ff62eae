"""The table of scores and masks: each row is what torch's own operators make of it."""

import re

import pytest
import torch

from kernlib.descriptors.expression import POSITIONS
from kernlib.descriptors.score.expression import ScoreExpression
from kernlib.descriptors.score.grammar import SCORE_CONSTANTS
from kernlib.runtime import expressions
from tests.docs.test_documents import DOCUMENTS
from tests.support.scores import placed, positions

PAGE = DOCUMENTS["docs/concepts/scores.md"]
SIZES = {"batch": 2, "head": 3, "row": 12, "col": 16}
WHOLE = ("past", "prefix", "query_document", "key_document", "reach")


def rows():
    """Name, score, mask and captured tensors of each row of the table."""
    found = {}
    for line in re.findall(r"^\| (.*) \|$", PAGE, re.M)[1:]:
        name, score, mask, captured = (cell.strip() for cell in line.split("|"))
        axes = {}
        for each in captured.split("; ") if captured else ():
            tensor, _, own = each.partition(": ")
            axes[tensor.strip("`")] = tuple(own.split(", ")) if own else ()
        found[name] = ScoreExpression(score.strip("`") or None, mask.strip("`") or None, axes)
    return found


ROWS = rows()
# What the same is by torch, of the logit, the four positions and the captured tensors.
SCORES = {
    "relative position bias": lambda v, b, h, i, j, t: v + t["bias"],
    "ALiBi": lambda v, b, h, i, j, t: v - t["slope"] * (i - j).abs(),
    "ALiBi, the slopes of 8 heads": lambda v, b, h, i, j, t: (
        v - torch.exp2(-(h + 1.0)) * (i - j).abs()
    ),
    "capped logits": lambda v, b, h, i, j, t: t["cap"] * torch.tanh(v / t["cap"]),
    "a temperature each head": lambda v, b, h, i, j, t: v * t["sharpness"].exp(),
    "key padding, added": lambda v, b, h, i, j, t: v + t["padding"],
    "attention mask, added": lambda v, b, h, i, j, t: v + t["penalty"],
    "a learned sink": lambda v, b, h, i, j, t: torch.where(j == 0, t["sink"], v),
    "other documents count less": lambda v, b, h, i, j, t: (
        v - (t["query_document"] != t["key_document"]) * t["distance"]
    ),
}
MASKS = {
    'key padding, "mul"': lambda b, h, i, j, t: t["padding"] != 0,
    'attention mask, "mul"': lambda b, h, i, j, t: t["kept"] != 0,
    "attention mask of bools": lambda b, h, i, j, t: t["kept"],
    "causal": lambda b, h, i, j, t: j <= i,
    "queries behind a cache of keys": lambda b, h, i, j, t: j <= i + t["past"],
    "window": lambda b, h, i, j, t: (j <= i) & (j >= i - 3),
    "a window each head": lambda b, h, i, j, t: (j <= i) & (i - j < t["reach"]),
    "prefix": lambda b, h, i, j, t: (j < t["prefix"]) | (j <= i),
    "documents": lambda b, h, i, j, t: t["query_document"] == t["key_document"],
    "dilated window": lambda b, h, i, j, t: ((i - j).abs() <= 8) & ((i - j).remainder(4) == 0),
    "the first keys and a window": lambda b, h, i, j, t: (j < 2) | (i - j < 4),
    "neighbours in an image 4 wide": lambda b, h, i, j, t: (
        (((i // 4) - (j // 4)).abs() <= 1) & (((i % 4) - (j % 4)).abs() <= 1)
    ),
}  # fmt: skip


def drawn(made: ScoreExpression, name: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for tensor, axes in made.captured:
        shape = [SIZES[axis] for axis in axes]
        if tensor in WHOLE:
            tensors[tensor] = torch.randint(0, 4, shape)
        elif "bools" in name:
            tensors[tensor] = torch.rand(shape) < 0.5
        else:
            tensors[tensor] = torch.randn(shape) * (torch.rand(shape) < 0.7 if shape else 1)
    return tensors


def test_every_row_has_its_formula():
    assert set(ROWS) == {*SCORES, *MASKS}
    for name, made in ROWS.items():
        assert (made.score is not None, made.mask is not None) == (name in SCORES, name in MASKS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_its_formula(name, seed):
    made = ROWS[name]
    tensors = drawn(made, name)
    values = positions(*SIZES.values())
    own = {tensor: placed(tensors[tensor], axes) for tensor, axes in made.captured}
    dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in own.values())
    place, trees = [values[axis] for axis in POSITIONS], made.trees(dtypes)
    if name in SCORES:
        v = torch.randn(tuple(SIZES.values()))
        found = expressions.score(trees.score, v, values | own)
        torch.testing.assert_close(found, SCORES[name](v, *place, own).expand(v.shape))
        assert set(made.differentiable(dtypes)) == own.keys() - {*WHOLE}
    else:
        found = expressions.mask(trees.mask, values | own, torch.float32)
        wanted = MASKS[name](*place, own)
        assert found.expand(tuple(SIZES.values())).equal(wanted.expand(tuple(SIZES.values())))
        assert made.differentiable(dtypes) == ()
        assert wanted.any() and not wanted.all()


def test_every_name_of_the_language_is_said():
    from kernlib.descriptors.expression import SCORE_FUNCTIONS

    for name in (*SCORE_FUNCTIONS, *SCORE_CONSTANTS, *POSITIONS, "v"):
        assert re.search(rf"\b{name}\b", PAGE.partition("## The language")[2]), name
