"""Tiles of Hopper's kernels for Kronecker-sparse products: CTAs cover the result once, alone or in
teams, and release weights that they keep."""

import re
from types import SimpleNamespace

import pytest

from kernlib.families.kronecker_sparse.kernels.factor import hopper
from tests.families.kronecker_sparse.lowering.cases import (
    PROCESSORS,
    SAMPLE,
    batch_last,
    choices,
    lowered,
    main_of,
    parameters,
    problem,
    text_of,
)

COUNTS = [1, 2, 3, 5, 26, 78, 114, 131, 132]  # of multiprocessors, whole and of a part of a GPU


def range_of(text, read, at, grid):
    """The Range of a CTA."""
    of = {"blockIdx": SimpleNamespace(x=at), "gridDim": SimpleNamespace(x=grid)}
    return text.run(text.body("explicit Range("), p=read, **of)


def tiles_of(step):
    """Index and Tile of each tile, for each CTA."""
    text, read = text_of(step.spec.source), parameters(step)
    ranged = "explicit Range(" in text.text
    loop = r"for \(u32 index = blockIdx.x; index < p.tiles; index \+= gridDim.x\) \{"
    assert ranged or len(re.findall(loop, text.text)) == 2
    place = text.body("Tile(const Parameters& p")
    for block_index in range(step.grid[0]):
        first, last, stride = block_index, read.tiles, step.grid[0]
        if ranged:
            made = range_of(text, read, block_index, step.grid[0])
            first, last, stride = made.first, made.last, made.step
        yield [(i, text.run(place, p=read, index=i)) for i in range(first, last, stride)]


def covers(given, step):
    """Checks that each tile is some CTA's, once; says how many each CTA has."""
    text, read = text_of(step.spec.source), parameters(step)
    made = list(tiles_of(step))
    places = [(t.block, t.lane, t.row, t.column) for tiles in made for _, t in tiles]
    assert sorted(places) == [
        (i, l, row, column)
        for i in range(given.blocks)
        for l in range(0, given.lanes, text.get("SPAN", 1))
        for row in range(read.row_tiles)
        for column in range(read.column_tiles)
    ]
    return [len(tiles) for tiles in made]


def test_the_sample_is_of_hoppers_kinds():
    assert [name for name in SAMPLE if not choices(SAMPLE[name])] == ["one of everything"]


@pytest.mark.parametrize("name", SAMPLE)
def test_tiles_cover_the_result_once(name):
    given = SAMPLE[name]._replace(rows=min(SAMPLE[name].rows, 1000))
    for found in choices(given):
        covers(given, main_of(found))


# Teams of CTAs.

WIDE = {"columns": 192, "depth": 48}
TEAMS = {  # by name: a problem, and its teams; 0 for as many as CTAs
    "results of four times what is read": (batch_last(lanes=16, blocks=4, **WIDE), 4),
    "results of twice what is read": (problem(), 4),
    "results of less": (problem(depth=49 + 7), 0),
    "a block of weights of 32 KB": (problem(columns=256, depth=64), 4),
    "two": (problem(columns=256, depth=72), 0),
    "high and low words of 24 KB": (batch_last(dtype="float32", columns=96, depth=24), 4),
    "of 48": (batch_last(dtype="float32", columns=192 // 2, depth=48), 0),
    "tf32, 24 KB": (batch_last(dtype="float32", precision="tf32", columns=192, depth=32), 4),
    "several tiles of columns": (problem(columns=512, depth=64), 0),
    "weights that do not stay": (problem(columns=96, depth=600), 0),
}


@pytest.mark.parametrize("name", TEAMS)
def test_teams_write_where_results_are_most_of_what_moves(name):
    given, teams = TEAMS[name]
    for multiprocessors in (2, 26, PROCESSORS):
        step = main_of(choices(given, multiprocessors)[0])
        assert parameters(step).teams == min(teams or step.grid[0], step.grid[0])
        text = text_of(step.spec.source)
        if teams:
            assert 0 < text["RESIDENT_BYTES"] <= hopper.TEAM_BYTES
    assert hopper.TEAMS == 4


# Few tiles, and some more than 132.
DIVIDED = [
    problem(blocks=1, rows=130 * 128), problem(blocks=5, rows=1000), problem(blocks=3, rows=25088),
    batch_last(lanes=7, rows=1000, **WIDE), problem(blocks=1, rows=64), problem(rows=66 * 128 + 1),
    problem(blocks=5, rows=1000, depth=96),
]  # fmt: skip


@pytest.mark.parametrize("multiprocessors", COUNTS)
@pytest.mark.parametrize("given", DIVIDED)
def test_teams_cover_the_result_once_and_none_has_more_than_its_part(given, multiprocessors):
    for found in choices(given, multiprocessors):
        step = main_of(found)
        counts, read = covers(given, step), parameters(step)
        assert read.tiles == sum(counts) and step.grid == (min(multiprocessors, read.tiles), 1)
        assert max(counts) == -(-read.tiles // step.grid[0])


@pytest.mark.parametrize("grid", COUNTS)
def test_teams_of_any_number_divide_any_number_of_tiles(grid):
    text = text_of(main_of(lowered(problem())).spec.source)
    assert text["RESIDENT"]
    for teams in {*range(1, min(grid, 9) + 1), grid}:
        for tiles in (grid, grid + 1, 2 * grid - 1, 1000, 2**31 - 1):
            read = SimpleNamespace(tiles=tiles, teams=teams)
            made = [range_of(text, read, at, grid) for at in range(grid)]
            ends = sorted({(r.last - (r.last - r.first), r.last) for r in made[:teams]})
            assert ends[0][0] == 0 and ends[-1][1] == tiles
            assert [begin for begin, _ in ends[1:]] == [end for _, end in ends[:-1]]
            for team in range(teams):  # its members stand side by side and move together
                members = made[team::teams]
                assert {(r.last, r.step) for r in members} == {(members[0].last, len(members))}
                begin = members[0].first
                assert [r.first for r in members] == [begin + n for n in range(len(members))]


def test_a_team_of_one_computes_neighbours_one_after_the_other():
    step = main_of(lowered(TEAMS["results of less"][0]))
    indices = [[index for index, _ in tiles] for tiles in tiles_of(step)]
    assert all(many == list(range(many[0], many[-1] + 1)) for many in indices)
    assert [index for many in indices for index in many] == list(range(parameters(step).tiles))


def test_others_compute_neighbours_at_the_same_time():
    step = main_of(lowered(TEAMS["weights that do not stay"][0]))
    for at, tiles in enumerate(tiles_of(step)):
        assert [index for index, _ in tiles] == list(range(at, parameters(step).tiles, PROCESSORS))


RESIDENT = [
    problem(blocks=5, rows=1000), problem(blocks=3, rows=1000, columns=512, depth=64),
    problem(blocks=200, rows=300), batch_last(lanes=7, rows=1000), problem(blocks=1, rows=20000),
    batch_last(lanes=16, blocks=4, rows=5000, **WIDE), problem(blocks=40, rows=1000, depth=64),
    problem(blocks=3, rows=130 * 128, dtype="float32", depth=32),
]  # fmt: skip


@pytest.mark.parametrize("multiprocessors", [3, 78, 132])
@pytest.mark.parametrize("given", RESIDENT)
def test_resident_weights_are_freed_when_a_ctas_next_tile_has_others(given, multiprocessors):
    step = main_of(choices(given, multiprocessors)[0])
    text, read = text_of(step.spec.source), parameters(step)
    assert text["RESIDENT"]
    after_this = re.search(r"u32 next = .*?;", text.text)[0]
    condition = re.search(r"if \(RESIDENT && \((next .*)\)\) \{", text.text)[1]
    for at, tiles in enumerate(tiles_of(step)):
        bounds = range_of(text, read, at, step.grid[0])
        groups, loaded, released = {}, 0, 0
        for (index, tile), after in zip(tiles, [*tiles[1:], None], strict=True):
            known = tile.group in groups
            groups.setdefault(tile.group, set()).add((tile.block, tile.lane, tile.column))
            code = f"{after_this} int freed = {condition};"
            freed = text.run(code, index=index, range=bounds, p=read).freed
            assert bool(freed) == (after is None or after[1].group != tile.group)
            # Loaded once, when all that was loaded before has been freed.
            assert known or loaded == released
            loaded, released = loaded + (not known), released + bool(freed)
        assert loaded == released == len(groups)
        assert all(len(places) == 1 for places in groups.values())
