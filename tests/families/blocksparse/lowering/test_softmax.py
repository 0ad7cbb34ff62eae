"""The kernels of block-sparse softmax: what lowering makes of a problem, run by threads of the host
from run_kernel to the last store, and what NVRTC makes of them."""

import itertools

import pytest
import torch

from kernlib.families.blocksparse.kernels import softmax as kernels
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import softmax as lowering
from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.families.blocksparse.lowering.softmax import Gradient, Operand, Options, Softmax
from kernlib.families.blocksparse.softmax.functions import softmax
from kernlib.families.blocksparse.softmax.operation import Kept, Needs, eager_pair, gradients
from kernlib.jit import targets
from tests.families.blocksparse.softmax import cases
from tests.families.blocksparse.softmax.cases import GATES, chance, dense, formula, values
from tests.families.blocksparse.softmax.options import NAMES, option_values
from tests.support import fakes
from tests.support.compiled_kernels import compiled
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.fakes import OnGpu
from tests.support.kernels import only, stem
from tests.support.speeds import slow_but

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ARCHES = ("sm_80", "sm_90a", "sm_120")


def contiguous(blocks: Blocks, batch: int = 1) -> Operand:
    slot = blocks.rows * blocks.cols
    return Operand((0, blocks.capacity * slot, slot, blocks.cols, 1))


def problem(dtype="float16", block=(64, 64), grid=(64, 64), heads=16, capacity=16384, **changes):
    """A call on contiguous values, with some fields changed."""
    blocks = Blocks(*block, *grid, heads, capacity)
    own = contiguous(blocks)
    made = Softmax(dtype, blocks, (1, 4), Options(), own, own)
    return made._replace(**changes)


def gradient(**sizes):
    made = problem(**sizes)
    return Gradient(made.dtype, made.blocks, made.batch, made.x, made.x, made.out)


# Which kernel.


def test_sizes_do_not_reach_the_source():
    more = {"grid": (100, 64), "heads": 1, "capacity": 1600, "block": (16, 64)}
    for make in (problem, gradient):
        assert only(kernels.lower(make())).spec == only(kernels.lower(make(**more))).spec
    assert stem(only(kernels.lower(problem())).spec) == "blocksparse_softmax"
    assert stem(only(kernels.lower(gradient())).spec) == "blocksparse_softmax_gradient"


@pytest.mark.parametrize(
    ("operand", "vectors"),
    [
        (Operand((0, 32768, 1024, 64, 1)), True),
        (Operand((0, 32768, 1024, 64, 1), 8), False),
        (Operand((0, 32768, 1024, 1, 64)), False),
        (Operand((4, 32768, 1024, 64, 1)), False),
        (Operand((0, 32768, 1028, 64, 1)), False),
    ],
)
def test_chunks_are_side_by_side(operand, vectors):
    for name in ("x", "out"):
        found = only(kernels.lower(problem(**{name: operand}))).spec.source
        assert f"VECTORS = {str(vectors).lower()};" in found


def test_grids():
    found = only(kernels.lower(problem()))
    tasks = 16 * 64 * 64  # heads, rows of blocks and of these
    warps = kernels.width("float16", problem().blocks)[1]
    assert found.grid == (tasks * warps // kernels.WARPS, 4)
    assert only(kernels.lower(problem(batch=(500, 500)))).grid[1] == kernels.MOST_DOWN
    assert only(kernels.lower(problem(grid=(0, 4), capacity=3))).grid == (1, 4)
    assert not lowering.takes(Blocks(128, 16, 2**22, 1, 8, 1))


def test_variants_are_all_that_is_chosen():
    options = [Options(), Options(causal=True, key="bool")]
    options.append(Options(rpe=True, key="add", attn="bool"))
    known = set(kernels.variants(options, ("float16", "float32")))
    assert len(known) == 4 * 2 * 4 * 3
    for dtype, columns, capacity in itertools.product(
        ("float16", "float32"), kernels.ACROSS, (64, 2**16)
    ):
        sizes = {"dtype": dtype, "block": (64, columns), "capacity": capacity}
        for made in (*(problem(**sizes, options=each) for each in options), gradient(**sizes)):
            assert only(kernels.lower(made)).spec in known


# What NVRTC makes of them.

FULL = Options(True, True, "add", "bool")
CODES = {
    f"{dtype} x{columns} {kind} {held}{'' if vectors else ' strided'}": (
        options,
        kernels.Rows.Variant(dtype, columns, held, vectors),
    )
    for dtype, columns in itertools.product(("float16", "bfloat16", "float32"), (16, 64, 128))
    for kind, options in {"softmax": Options(), "full": FULL, "gradient": None}.items()
    for held, vectors in ((2, True), (4 if kind == "full" else 8, True), (2, False))
}
FAST = ("float16 x64 softmax 2", "float16 x64 gradient 2")


@pytest.mark.parametrize("arch", slow_but(("sm_90a",), ARCHES))
@pytest.mark.parametrize("name", slow_but(FAST, CODES))
def test_nothing_is_spilled(name, arch):
    """A limit on instructions bounds the compile time, of which 10 take 1 ms."""
    options, variant = CODES[name]
    kernel = kernels.GRADIENT if options is None else kernels.SOFTMAX
    made = compiled(kernel.spec(options, variant), arch)
    assert made.spilled == 0 and made.instructions < 4500
    shared = made.entry.meta["shared_bytes"]
    held = targets.resident_blocks(arch, kernels.THREADS, made.registers, int(shared))
    assert held >= 2


# Run by threads of the host.


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    """GPUs whose kernels are run by threads of the host; ``specs`` are those that were launched."""
    fakes.forget()
    made = emulated.install(monkeypatch, kernels_of(tmp_path_factory))
    yield made
    fakes.forget()


def gpu(value):
    """A tensor or a layout on GPU 0; other values as they are."""
    if isinstance(value, Layout):
        return Layout.from_layout(value.text, tuple(map(gpu, value.tensors)))
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().as_subclass(OnGpu).requires_grad_(value.requires_grad)


def host(t: torch.Tensor) -> torch.Tensor:
    return t.detach().as_subclass(torch.Tensor)


def check(made, x, gate, wanted_launches=1, launched=(), **given):
    found = softmax(gpu(x), gpu(made), **{name: gpu(value) for name, value in given.items()})
    assert found.dtype == x.dtype and found.is_contiguous() and len(launched) == wanted_launches
    cases.check(made, host(found), formula(made, x, **given), gate)


# Grid, block, dtype: rows that a warp takes, that several do, that are longer than their registers.
SHAPES = {
    "halves": ((2, 3, 4), (16, 16), F16),
    "floats": ((3, 5), (32, 64), F32),
    "wide": ((2, 3), (16, 128), F32),
    "bfloat16": ((2, 20), (16, 32), BF16),
    "one column": ((3, 1), (16, 16), F32),
    "several warps": ((2, 40), (16, 64), F16),
}


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("halves", "bfloat16"), SHAPES))
def test_values_are_right(name, gpus, seed):
    grid, block, dtype = SHAPES[name]
    made = cases.layout(chance(*grid), block)
    x = values(made, 2, dtype=dtype)
    check(made, x, GATES[dtype], launched=gpus.specs, scale=0.4)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("dtype", slow_but((F16,), (F16, F32)), ids=str)
def test_rows_that_registers_do_not_hold(dtype, warps, gpus, monkeypatch, seed):
    """Of one warp, or several that exchange what they found; also in the place of x."""
    monkeypatch.setattr(kernels, "width", lambda *_: (2, warps))
    monkeypatch.setattr(kernels, "MOST_DOWN", 2)
    made = cases.layout(chance(2, 40), 16)
    x = values(made, 5, dtype=dtype)
    check(made, x, GATES[dtype], launched=gpus.specs)
    check_gradient(made, x, torch.randn_like(x), GATES[dtype])
    wanted = formula(made, x)
    softmax(gpu(x), gpu(made), out=gpu(x))
    cases.check(made, x, wanted, GATES[dtype])
    assert len(gpus.specs) == 4


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("all", "key of -inf", "least attn"), NAMES))
@pytest.mark.parametrize("dtype", slow_but((BF16,), (BF16, F32)), ids=str)
def test_options_are_right(name, dtype, gpus, seed):
    made = cases.layout(chance(2, 2, 5), (32, 16))
    x, given = values(made, 3, dtype=dtype), option_values(made, dtype)[name]
    on_gpu = {key: gpu(value) for key, value in given.items()}
    found = softmax(gpu(x), gpu(made), gpu(torch.tensor(0.5)), **on_gpu)
    cases.check(made, host(found), formula(made, x, 0.5, **given), 2 * GATES[dtype])
    assert len(gpus.specs) == 1


@pytest.mark.emulated
@pytest.mark.parametrize("turned", slow_but((True,), (False, True)))
def test_any_strides_and_in_place(turned, gpus, seed):
    """Without a copy."""
    made = cases.layout(chance(2, 2, 3), 16)
    x, rpe = values(made, 2, dtype=F32), dense(made, 2, dtype=F32)
    wanted = formula(made, x, rpe=rpe)
    if turned:
        x, rpe = x.mT.contiguous().mT, rpe.mT.contiguous().mT
    given, on_gpu = gpu(x), gpu(made)
    assert softmax(given, on_gpu, rpe=gpu(rpe), out=given) is given
    cases.check(made, x, wanted, 1e-6)
    assert ("strided" in gpus.specs[0].description) == turned


@pytest.mark.emulated
@pytest.mark.parametrize("is_out", slow_but((True,), (False, True)))
def test_batches_without_two_strides(is_out, gpus, seed):
    """x and the padding are copied, and out is written by a copy."""
    made = cases.layout(chance(2, 3), 16)
    x = values(made, 3, 2, 2, dtype=F32).transpose(0, 2)
    out = torch.full((3, 2, 2, *x.shape[3:]), 77.0).transpose(0, 2) if is_out else None
    key = torch.randn(x.shape[1], 1, made.shape[1])
    found = softmax(gpu(x), gpu(made), key_padding_mask=gpu(key), out=gpu(out))
    cases.check(made, host(found), formula(made, x, key_padding_mask=key), 1e-6)
    if is_out:
        assert torch.equal(out, host(found)) and not out.is_contiguous()


@pytest.mark.emulated
def test_empty_ones(gpus):
    made = cases.layout(torch.zeros(2, 3), 16, 5)
    x = torch.full((2, 5, 16, 16), torch.nan, dtype=F16)
    assert not host(softmax(gpu(x), gpu(made))).any() and len(gpus.specs) == 1
    made = cases.layout(torch.zeros(2, 3), 16, 0)
    assert softmax(gpu(x[:, :0]), gpu(made)).shape == (2, 0, 16, 16) and len(gpus.specs) == 1


@pytest.mark.emulated
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_infinities_and_nan_are_as_in_torch(value, gpus, seed):
    made = cases.layout(torch.ones(1, 9), 16, 0)
    x = values(made, dtype=F16)
    x[0, 3, 5], x[:, 4] = value, -torch.inf
    y = made.to_dense(host(softmax(gpu(x), gpu(made))))
    assert y.isnan().any(-1).nonzero().tolist() == [[3]] and y[3].isnan().all()
    assert not y[4].any() and len(gpus.specs) == 1


def check_gradient(made, x, grad, gate, scale=1.0, **given):
    """By x, a scale that is a tensor, rpe and masks, all of which are added. Autograd hands results
    on as tensors of the CPU, which they are."""
    is_tensor = isinstance(scale, torch.Tensor)
    y = softmax(gpu(x), gpu(made), gpu(scale), **{name: gpu(t) for name, t in given.items()})
    shapes = tuple(given[name].shape if name in given else None for name in cases.NAMES)
    kept = Kept(gpu(made), y, gpu(x), gpu(scale), shapes)
    needs = Needs(True, is_tensor, *(name in given for name in cases.NAMES))
    with torch.no_grad():
        found = [t for t in gradients(kept, gpu(grad), needs, eager_pair) if t is not None]
    named = {"x": x, **({"scale": scale} if is_tensor else {})}
    named |= {name: given[name] for name in cases.NAMES if name in given}
    wide = {name: t.double().requires_grad_() for name, t in named.items()}
    y = formula(made, **{"scale": scale, **wide})
    wanted = torch.autograd.grad(y, [*wide.values()], made.to_dense(grad.double()))
    cases.check_gradients(map(host, found), wanted, x, 4 * gate)
    assert not host(found[0])[..., made.nnz :, :, :].any()


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("halves",), SHAPES))
def test_gradients_are_right(name, gpus, seed):
    grid, block, dtype = SHAPES[name]
    made = cases.layout(chance(*grid), block)
    x = values(made, 2, dtype=dtype)
    check_gradient(made, x, torch.randn_like(x), GATES[dtype], 0.4)
    assert [stem(spec) for spec in gpus.specs] == [
        "blocksparse_softmax",
        "blocksparse_softmax_gradient",
    ]


@pytest.mark.emulated
def test_gradients_of_all_tensors(gpus, seed):
    """By one launch, of a gradient of any strides."""
    made = cases.layout(chance(2, 2, 3), 16)
    x, grad = values(made, 2, dtype=F32), values(made, 2, dtype=F32).mT.contiguous().mT
    key, attn = torch.randn(2, made.shape[1]), torch.randn(made.shape)
    given = {"rpe": dense(made, dtype=F32), "key_padding_mask": key, "attn_mask": attn}
    check_gradient(made, x, grad, 1e-6, torch.tensor(0.7), **given)
    assert len(gpus.specs) == 2
