"""Which products torch computes, of those that were measured on an H100 and at the edges."""

import pytest

import kernlib as kl
from kernlib.families.kronecker_product.lowering import by_torch, choose
from kernlib.families.kronecker_product.lowering.problem import Layout
from tests.families.kronecker_product.lowering.test_choose import SHAPES, problem

# Rows, factors and numbers; microseconds of kernels and of torch in a CUDA graph; who it is.
MEASURED = [
    (12, "22x9*10x5*12x5*3x19*31x98", "fp32", 337.5, 63.0, "torch"),
    (13, "5x13*3x12*3x87*4x23*90x3", "fp32", 180.4, 67.9, "torch"),
    (21, "47x99*14x88*24x27", "fp32", 94.0, 45.4, "torch"),
    (4, "104x59*64x37", "fp32", 22.9, 12.1, "torch"),
    (740, "127x76*40x2", "fp32", 40.7, 27.7, "torch"),
    (3, "18x3*103x58", "fp64", 14.9, 7.0, "torch"),
    (17, "47x28*31x101", "fp64", 10.8, 6.6, "torch"),
    (58, "66x2*15x2*58x6*46x5", "fp64", 2336.2, 1015.7, "torch"),
    (1024, "128x128*128x128", "fp64", 504.8, 221.9, "torch"),
    (1024, "64x64*64x64", "fp64", 49.4, 54.4, "kernels"),
    (1024, "32x32*32x32*32x32", "fp64", 390.9, 551.8, "kernels"),
    (6, "5x2*9x74", "fp64", 5.4, 5.8, "kernels"),
    (47, "53x74*4x4*6x3*6x29", "fp64", 31.5, 87.1, "kernels"),
    (499, "68x30*99x9", "fp32", 30.2, 23.3, "kernels"),  # which are not known to be slower
    (160, "3x8*3x65*3x6", "fp32", 6.9, 24.7, "kernels"),
    (2353, "29x2*4x31", "fp32", 5.7, 14.1, "kernels"),
    (1, "2x2*2x2*2x2*2x2*2x2*2x2*2x2*2x2*2x2*2x2*2x2", "fp64", 4.9, 32.2, "kernels"),
]
LARGE = 4, ((104, 59), (64, 37))


def sizes_of(text: str) -> tuple:
    return tuple(tuple(map(int, size.split("x"))) for size in text.split("*"))


def lower(given, passes=0, arch="sm_90a", count=132, choice=None, epilogue=()):
    return choose.lower(epilogue, given, arch, count, choice, passes)


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_the_faster_of_both_computes(case):
    rows, text, numbers, _, of_torch, who = case
    given = problem(rows, sizes_of(text), numbers)
    assert (lower(given) is None) == (who == "torch")
    found = by_torch.torch_time(given, by_torch.products(given), 0)
    assert 0.5 < found / of_torch < 1.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("numbers", ["fp32", "fp64"])
def test_factors_of_whole_chunks_are_kernels(shape, numbers):
    """But 128 x 128 in float64."""
    rows, sizes = SHAPES[shape]
    found = {count for count in (1, 20, rows) if lower(problem(count, sizes, numbers)) is None}
    assert not found or (numbers == "fp64" and max(sizes[0]) >= 64)


def test_only_where_torch_may_and_was_measured():
    given = problem(*LARGE)
    assert lower(given) is None
    kernels = lower(given, None)
    assert kernels.steps
    assert lower(given, arch="sm_90") == lower(given, None, "sm_90")  # KERNLIB_PORTABLE=1
    for count in (78, 131, 133):
        assert lower(given, count=count).steps
    for numbers in ("fp16", "tf32"):
        assert lower(problem(*LARGE, numbers), None).steps
    assert lower(problem(*LARGE, "fp16")).steps
    assert lower(problem(*LARGE, inside=True)).steps


def test_a_choice_that_is_kept_goes_first():
    given = problem(*LARGE)
    assert lower(given, choice={"kind": "modes"}) == lower(given, None)
    assert lower(given, choice={"kind": "nobody knows"}) is None


def test_factors_that_vary_with_the_batch_are_kernels():
    given = problem(*LARGE)._replace(batch=3)
    assert lower(given) is None
    first, second = given.factors
    varied = first._replace(batch_stride=first.rows * first.columns), second
    assert lower(given._replace(factors=varied)).steps


def test_passes_behind_the_products_count():
    """Each is a launch and moves the result."""
    assert [lower(problem(*LARGE), n) is None for n in (0, 1, 9)] == [True, True, False]
    passes = by_torch.passes_of
    assert passes(()) == 0
    assert passes((kl.Scale(),)) == passes((kl.Bias(),)) == 1
    assert passes((kl.Bias(), kl.Gelu())) == 3
    assert passes((kl.Add(),)) == 2 + by_torch.SUMMAND
    assert passes((kl.Gate(),)) > 3


def test_an_x_that_is_not_contiguous_is_copied():
    given = problem(*LARGE)
    made, wide = by_torch.products(given), given.in_features
    whole = by_torch.torch_time(given, made, 0)
    for strides in ((wide + 1, 1), (1, 4)):
        apart = given._replace(x=Layout(0, 0, *strides))
        assert by_torch.torch_time(apart, made, 0) > whole + by_torch.PASS
    row = problem(1, LARGE[1])._replace(x=Layout(0, 0, 7, 1))  # whose stride is anything
    assert by_torch.torch_time(row, made, 0) == by_torch.torch_time(problem(1, LARGE[1]), made, 0)
    batch = given._replace(batch=2, x=Layout(4 * wide, 0, wide, 1))
    spread = batch._replace(x=Layout(5 * wide, 0, wide, 1))
    times = [by_torch.torch_time(each, made, 0) for each in (batch, spread)]
    assert times[1] > times[0] + by_torch.PASS


def test_no_more_memory_than_is_said():
    sizes = ((66, 2), (15, 2), (58, 6), (46, 5))
    found = [lower(problem(rows, sizes, "fp64")) is None for rows in (58, 58 * 40)]
    assert found == [True, False]


@pytest.mark.parametrize(
    "sizes",
    [((1, 1),), ((1, 3), (5, 1)), ((1, 1),) * 63 + ((1, 3), (5, 1)), ((2, 2),) * 40],
    ids=lambda sizes: f"{len(sizes)} factors",
)
@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_estimates_at_the_edges(sizes, rows):
    given = problem(rows, sizes[:12] if len(sizes) == 40 else sizes)
    made = by_torch.products(given)
    assert len(made) == len(given.factors)
    first, last = made[0], made[-1]
    assert first.left * first.size[0] * first.right == rows * given.in_features
    assert last.left * last.size[1] * last.right == rows * given.out_features
    assert 0 < by_torch.torch_time(given, made, 0) < by_torch.torch_time(given, made, 1)
    assert lower(given).steps  # small factors are kernels


def test_products_are_those_of_the_reference():
    """The factor that shortens rows most first, and as few copies as it makes."""
    made = by_torch.products(problem(24, ((94, 118), (2, 5))))
    assert made == [
        by_torch.Product(0, 24, (94, 118), 2, True),
        by_torch.Product(1, 24 * 118, (2, 5), 1, False),
    ]
    (one,) = by_torch.products(problem(7, ((3, 4),)))
    assert one == by_torch.Product(0, 7, (3, 4), 1, False) and one.elements == 49 and one.tiles == 1
