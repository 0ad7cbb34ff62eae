"""Which products torch computes, of those that were measured on an H100 and at the edges."""

import pytest

import kernlib as kl
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.lowering import by_torch, choose, estimates
from kernlib.families.kronecker_product.lowering.problem import Layout
from tests.families.kronecker_product.lowering.test_choose import SHAPES, problem

# Rows, factors and numbers; microseconds of kernels and of torch in a CUDA graph; who it is.
MEASURED = [
    (12, "22x9*10x5*12x5*3x19*31x98", "fp32", 243.6, 63.0, "torch"),
    (13, "5x13*3x12*3x87*4x23*90x3", "fp32", 172.1, 67.9, "torch"),
    (21, "47x99*14x88*24x27", "fp32", 92.4, 45.4, "torch"),
    (4, "104x59*64x37", "fp32", 21.5, 12.1, "torch"),
    (740, "127x76*40x2", "fp32", 37.6, 27.7, "torch"),
    (3, "18x3*103x58", "fp64", 10.9, 7.0, "torch"),
    (17, "47x28*31x101", "fp64", 9.1, 6.6, "torch"),
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
# The same, with the times of torch's products, with neighbours up to 64 as one, and the kind of
# kernels; whose estimates are checked too.
WAYS = [
    (1384, "105x3*9x5*3x4", "fp32", {"torch": 41.5, "merged": 23.1, "modes": 30.3}, "merged"),
    (1384, "105x3*9x5*3x4", "fp64", {"torch": 47.7, "merged": 24.7, "modes": 44.4}, "merged"),
    (1243, "13x2*2x22*97x3", "fp32", {"torch": 50.0, "merged": 22.1, "modes": 34.8}, "merged"),
    (1243, "13x2*2x22*97x3", "fp64", {"torch": 47.7, "merged": 27.7, "modes": 35.1}, "merged"),
    (737, "3x2*19x6*47x9", "fp32", {"merged": 18.7, "modes": 38.4}, "merged"),
    (24, "94x118*2x5", "fp32", {"torch": 15.4, "modes": 13.6}, "modes"),
    (38, "6x8*41x49", "fp64", {"torch": 6.3, "modes": 5.4}, "modes"),
    (2, "31x14*11x29*62x4*55x71", "fp32", {"torch": 25.0, "modes": 32.7}, "torch"),
    (164, "4x100*2x25*103x10*27x13", "fp64", {"torch": 357.5, "slabs": 466.5}, "torch"),
    (4, "5x57*4x5", "fp64", {}, "modes"),
    (777, "10x24*29x10*26x7", "fp64", {"torch": 81.5, "modes": 43.1}, "modes"),
    (499, "68x30*99x9", "fp64", {"torch": 30.0, "modes": 38.5}, "torch"),
    (58, "66x2*15x2*58x6*46x5", "fp32", {"torch": 446.0, "modes": 660.9}, "torch"),
]
# Microseconds of one launch for each run, and of one for all.
SEVERAL_RUNS = [
    (198, "19x16*2x9*19x14*5x2*10x3*33x4", "fp64", 2079.7, 3441.6),
    (777, "26x19*4x8*2x10*4x72*2x2", "fp32", 943.3, 1171.5),
    (243, "4x122*73x4*6x103*75x17", "fp64", 1086.7, 1295.4),
    (223, "3x77*101x24*22x125", "fp64", 252.0, 324.2),
    (2003, "6x33*2x6*4x96", "fp64", 238.0, 290.9),
    (58, "66x2*15x2*58x6*46x5", "fp64", 921.9, 2340.4),
    (226, "5x7*29x14*6x80*41x4", "fp32", 61.3, 92.9),
    (3, "72x24*3x7*15x2*11x61*7x19*7x12", "fp64", 317.0, 582.5),
    (172, "3x26*17x26*7x3*11x3*127x87", "fp64", 1891.3, 1768.0),
    (4, "10x127*4x17*9x19*119x3*10x13*8x17", "fp64", 2115.6, 1430.9),
    (4, "10x127*4x17*9x19*119x3*10x13*8x17", "fp32", 1112.1, 796.6),
    (164, "4x100*2x25*103x10*27x13", "fp64", 659.8, 466.5),
    (13, "5x13*3x12*3x87*4x23*90x3", "fp64", 350.8, 305.7),
    (12, "22x9*10x5*12x5*3x19*31x98", "fp16", 232.2, 320.3),
    (596, "8x71*74x7*44x25*4x11", "fp16", 698.6, 1001.8),
    (243, "4x122*73x4*6x103*75x17", "fp16", 1276.1, 984.5),
    (164, "4x100*2x25*103x10*27x13", "fp16", 320.4, 250.8),
]


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


def kind(lowered) -> str:
    return lowered.steps[-1].spec.description.split()[1]


def named(case) -> str:
    return f"{case[0]} {case[1]} {case[2]}"


@pytest.mark.parametrize("case", WAYS, ids=named)
def test_the_fastest_way_of_all_computes(case):
    rows, text, numbers, times, way = case
    given = problem(rows, sizes_of(text), numbers)
    merged = by_torch.products(given, by_torch.MERGED)
    lowered = lower(given)
    if lowered is not None:
        assert kind(lowered) == way
    else:
        is_merged = way == "merged"
        found = by_torch.fastest(given, 0)
        assert is_merged or way == "torch"
        assert (found == merged != by_torch.products(given)) == is_merged
    for name, made in (("torch", by_torch.products(given)), ("merged", merged)):
        if name in times:
            assert 0.6 < by_torch.torch_time(given, made, 0) / times[name] < 1.4


@pytest.mark.parametrize("case", SEVERAL_RUNS, ids=named)
def test_runs_are_as_many_launches_as_take_less_time(case):
    """Slabs wait for tickets, and a launch for each run takes longer where tiles share sectors."""
    rows, text, numbers, apart, at_once = case
    given = problem(rows, sizes_of(text), numbers)
    assert kind(lower(given, None)) == ("modes" if apart < at_once else "slabs")


def test_launches_take_no_more_memory_than_is_said():
    """What one hands to the next grows with the rows; that of slabs does not."""
    sizes = sizes_of("19x16*2x9*19x14*5x2*10x3*33x4")
    found = {rows: lower(problem(rows, sizes, "fp64"), None) for rows in (198, 198 * 99)}
    assert [kind(made) for made in found.values()] == ["modes", "slabs"]
    assert max(made.workspace for made in found.values()) < estimates.MOST_BYTES


def test_the_number_of_launches_where_nothing_was_measured():
    """What is handed on as a whole stays in the L2 cache, or goes by slabs: of other GPUs, TF32,
    factors on the left or of a batch, and sizes of multiples of 8."""
    sizes = sizes_of("6x33*2x6*4x96")
    given = problem(2003, sizes, "fp64")
    varied = given.factors[0]._replace(batch_stride=198), *given.factors[1:]
    assert kind(lower(given, None)) == "modes"
    assert kind(lower(given, None, count=131)) == "slabs"
    assert kind(lower(given, None, arch="sm_90")) == "slabs"
    assert kind(lower(given._replace(factors=varied, batch=9), None)) == "slabs"
    assert kind(lower(problem(2003, sizes, "fp64", inside=True), None)) == "slabs"
    whole = problem(20, ((32, 32),) * 4, "fp64")
    assert not estimates.are_ragged(whole) and kind(lower(whole, None)) == "slabs"


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
    passes = plans.passes_of
    assert passes(()) == 0
    assert passes((kl.Scale(),)) == passes((kl.Bias(),)) == 1
    assert passes((kl.Bias(), kl.Gelu())) == 3
    assert passes((kl.Add(),)) == 2 + plans.SUMMAND
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


def test_a_factor_that_is_multiplied_out_costs_a_launch():
    given = problem(24, ((13, 2), (2, 22)))
    one = problem(24, ((26, 44),))
    merged, single = by_torch.products(given, 64), by_torch.products(one)
    assert merged == [single[0]._replace(parts=2)]
    times = by_torch.torch_time(given, merged, 0), by_torch.torch_time(one, single, 0)
    assert times[0] == pytest.approx(times[1] + by_torch.PASS)
