"""How columns are divided among warps, by a matrix's shape and entries."""

import pytest
import torch

from kernlib.families.sparse.formats import slices, tiling
from kernlib.families.sparse.formats.tiling import Tiling, tiling_of


def test_widths_of_small_and_wide_matrices():
    assert tiling.panel_width(8192, 28672, 2) == 1792
    assert tiling.panel_width(4096, 4096, 2) == 512
    assert tiling.panel_width(0, 0, 2) == tiling.panel_width(7, 1, 4) == 16
    assert tiling.panel_width(49152, 12288, 4) <= tiling.MOST_WIDTH // 2


SHAPES = {
    (4096, 4096): 8, (12288, 4096): 8, (22016, 4096): 5, (4096, 11008): 16, (4096, 14336): 16,
    (5120, 5120): 8, (13824, 5120): 8, (36864, 12288): 3, (49152, 12288): 8, (128256, 4096): 2,
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_of_language_models_are_cut_into_parts(shape):
    """Of which an H200 holds all at a time, where they are not very many."""
    width, parts = tiling_of(shape, 2)
    assert parts == SHAPES[shape] and width == shape[1]
    assert tiling_of(shape, 2, columns=2) == (width, parts)
    assert tiling_of(shape, 2, columns=3).parts == 1


def test_what_is_not_cut_into_parts():
    assert tiling_of((12288, 49152), 2).parts == 1  # x of four vectors is more than shared memory
    assert tiling_of((8192, 28672), 4).parts == 1
    assert tiling_of((32, 28672), 2).parts == 1  # one multiprocessor would do all
    assert tiling_of((5120, 13824), 2).parts == 1  # some would do two slices, most of them one
    assert tiling_of((8192, 28672), 2).parts == 1  # x takes longer to stage than a launch
    assert tiling_of((4096, 512), 2) == Tiling(512)
    assert tiling_of((0, 0), 2) == tiling_of((7, 1), 4) == Tiling(16)


@pytest.mark.parametrize("code", slices.FORMATS)
@pytest.mark.parametrize("shape", ((0, 2000), (0, 40000), (3, 0), (0, 0)), ids=str)
def test_matrices_without_elements(code, shape):
    form, dense = slices.FORMATS[code], torch.zeros(shape, dtype=torch.float16)
    tensors, facts = form.encode(dense)
    form.check(tensors, facts, shape, dense.dtype)
    assert form.decode(tensors, facts, shape, dense.dtype).shape == shape
    assert form.nbytes(dense) == sum(t.nbytes for t in tensors.values())


def test_matrices_whose_entries_lie_close_together_keep_panels():
    """Steps from the first column to a band would be most of the codes."""
    band = torch.zeros(1024, 4096, dtype=torch.float16)
    for row in range(1024):
        band[row, 4 * row : 4 * row + 40] = 1
    for form in slices.FORMATS.values():
        _, facts = form.encode(band)
        assert facts["parts"] == 1


def test_parts_have_some_codes():
    few = (torch.rand(4096, 4096, generator=torch.Generator().manual_seed(0)) < 0.01).half()
    assert slices.FORMATS["u8"].encode(few)[1]["parts"] == 2
    dense = torch.zeros(256, 4096, dtype=torch.float16)
    dense[:, ::4] = 1
    assert slices.FORMATS["u8"].encode(dense)[1]["parts"] == 8
    dense[:, ::8] = 0
    assert slices.FORMATS["u8"].encode(dense)[1]["parts"] == 6


def test_several_vectors_take_parts_where_rows_are_many_and_codes_few():
    few = torch.zeros(8448, 4096, dtype=torch.float16)
    few[:, ::16] = 1
    form = slices.FORMATS["u8"]
    assert form.encode(few, columns=4)[1]["parts"] > 1
    assert form.encode(few[:8416], columns=4)[1]["parts"] == 1  # a slice less
    assert form.encode(few, columns=5)[1]["parts"] == 1
    few[:, ::8] = 1
    assert form.encode(few, columns=4)[1]["parts"] == 1
