"""Two factors in one launch: which it takes, the tiles it is given, and what its text computes on
the host."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import reference
from kernlib.families.kronecker_sparse.kernels.chain import fused_chain
from kernlib.families.kronecker_sparse.kernels.chain.fused_chain import (
    Chain,
    ChainScope,
    FusedChain,
)
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from tests.families.kronecker_sparse.lowering.cases import ARCH, PROCESSORS, factor, parameters
from tests.support.compiled_kernels import compiled
from tests.support.emulation import maps
from tests.support.emulation.emulator import Emulator, kernels_of

UP, DOWN = ((6, 64, 64, 1), (1, 768, 192, 2)), ((6, 64, 256, 1), (1, 128, 128, 3))
WIDE = ((64, 64, 64, 1), (1, 256, 64, 64))
CHAINS = {
    "ViT-S/16, 384 to 384": ((2, 48, 192, 1), (1, 192, 48, 2)),
    "ViT-S/16, 384 to 1536": UP,
    "ViT-S/16, 1536 to 384": DOWN,
    "ViT-B/16, 768 to 768": ((2, 96, 384, 1), (1, 384, 96, 2)),
    "d = 1": ((4, 32, 24, 1), (2, 136, 64, 1)),
    "d = 4": ((4, 32, 24, 1), (1, 136, 32, 4)),
    "d = 5": ((2, 80, 72, 1), (1, 40, 32, 5)),
    "d = 8": ((4, 32, 24, 1), (1, 136, 16, 8)),
    "1024 to 4096": ((16, 64, 64, 1), (1, 256, 64, 16)),
    "2048 to 8192": ((32, 64, 64, 1), (1, 256, 64, 32)),
    "4096 to 16384": WIDE,
}
MANY = tuple(kl.Bias(f"bias{index}") for index in range(9))
EPILOGUES = {"none": (), "bias": (kl.Bias(),), "gelu": (kl.Bias(), kl.Scale(), kl.Gelu())}


def problems(chain, rows=25088, dtype="float16"):
    return [factor(*pattern, rows=rows, dtype=dtype) for pattern in chain]


def variants_for(chain=UP, epilogue=(), first=None, second=None, arch=ARCH, **options):
    """The variants for a chain, some of whose fields are changed."""
    before, after = problems(chain, **options)
    before, after = before._replace(**(first or {})), after._replace(**(second or {}))
    chain = Chain(before, after, epilogue)
    if not FusedChain().takes(chain, arch):
        return []
    return fused_chain.variants_of(epilogue, before.dtype, *chain.patterns)


def lowered_of(chain=UP, epilogue=(), processors=PROCESSORS, **options):
    pair = Chain(*problems(chain, **options), epilogue)
    return fused_chain.lower(pair, Gpu(ARCH, processors))


@pytest.mark.few(20)
@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_networks_are_taken(name):
    for dtype in ("float16", "bfloat16"):
        assert variants_for(CHAINS[name], dtype=dtype)


REFUSED = {
    "float32": {"dtype": "float32"},
    "an older GPU": {"arch": "sm_80"},
    "a newer GPU": {"arch": "sm_100a"},
    "a first factor with d = 2": {"chain": ((3, 64, 64, 2), (1, 768, 192, 2))},
    "blocks that the second factor cuts": {"chain": ((3, 64, 64, 1), (2, 96, 48, 2))},
    "rows of no whole 16 bytes": {"chain": ((6, 64, 60, 1), (1, 768, 192, 2))},
    "no whole steps along k": {"chain": ((5, 8, 64, 1), (1, 64, 20, 2))},
    "d = 12": {"chain": ((3, 64, 64, 1), (1, 64, 16, 12))},
    "d = 24, blocks of 64": {"chain": ((6, 64, 64, 1), (1, 64, 16, 24))},
    "an odd number of columns": {"chain": ((4, 32, 24, 1), (1, 135, 16, 8))},
    "blocks of 136 features": {"chain": ((2, 136, 64, 1), (1, 64, 136, 2))},
    "more features between than fit": {"chain": ((12, 64, 64, 1), (1, 1536, 384, 2))},
    "x whose features lie apart": {"first": {"left": Layout(128, 1, 768, 2)}},
    "x that begins in a chunk": {"first": {"left": Layout(64, 1, 384, 1, 8)}},
    "a first weight that is turned": {"first": {"right": Layout(4096, 1, 1, 64)}},
    "a result whose features lie apart": {"second": {"out": OutLayout(3072, 1, 3072, 4)}},
    "a result that begins in a chunk": {"second": {"out": OutLayout(1536, 1, 1536, 2, 8)}},
    "rows of the result that do": {"second": {"out": OutLayout(1536, 1, 1540, 2)}},
}


@pytest.mark.few(len(REFUSED))
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_for_the_kernels_of_one_factor(name):
    assert variants_for() and not variants_for(**REFUSED[name])


@pytest.mark.parametrize("rows, is_taken", [(1, False), (128, False), (25088, True)])
def test_few_rows_would_leave_a_gpu_idle(rows, is_taken):
    assert variants_for(rows=rows)
    assert (lowered_of(rows=rows) is not None) == is_taken


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("rows", [12608, 25088, 25089])
def test_launches(rows, name, epilogue):
    chain = CHAINS[name]
    variants = variants_for(chain, epilogue, rows=rows)
    packing, main = lowered_of(chain, epilogue, rows=rows).steps
    read = parameters(main._replace(pointers=_as_of_cases(main)))
    for variant in variants:
        stages, shared = fused_chain.shared_memory(variant, len(epilogue[:1]))
        assert stages >= 3 and shared <= targets.SHARED_BYTES[ARCH]
    assert read.units == read.row_tiles * read.spans * read.splits * chain[1][0]
    assert main.grid == (min(PROCESSORS, read.units), 1) and main.overlaps
    assert 1 <= read.splits <= read.column_tiles
    scope = ChainScope(chain, ("float16",), ARCH)
    assert {packing.spec, main.spec} <= {*FusedChain().specs(epilogue, scope, ARCH)}


def _as_of_cases(step):
    """Pointers by names that :mod:`cases` has addresses for."""
    names = {"x": "left", "weight1": "right", "weight2": "right"}
    return tuple((names.get(name, name), at) for name, at in step.pointers)


def test_room_for_many_vectors_is_taken_from_the_stages():
    for name, chain in CHAINS.items():
        for variant in variants_for(chain, MANY):
            stages, shared = fused_chain.shared_memory(variant, len(MANY))
            assert stages >= (4 if variant.pairs == 3 else 3), name
            assert shared <= targets.SHARED_BYTES[ARCH]


def test_the_last_round_of_tiles_is_full():
    """25088 rows are 131 tiles of 192, on 132 multiprocessors, and 196 of 128."""
    chain = CHAINS["ViT-S/16, 384 to 384"]
    variants = variants_for(chain)
    assert [variant.rows for variant in variants] == [192, 128]
    main = lowered_of(chain, processors=132).steps[-1]
    assert parameters(main._replace(pointers=_as_of_cases(main))).row_tiles == 131


# What NVRTC makes of it.

# Registers of a thread at launch, by threads: what the producer hands on must be there.
REGISTERS = {384: 168, 512: 128, 640: 96}


def checked(name, epilogue, dtype="float16"):
    for variant in variants_for(CHAINS[name], epilogue, dtype=dtype):
        spec = FusedChain().spec(epilogue, variant, ARCH)
        kernel = compiled(spec, ARCH)
        assert kernel.registers == REGISTERS[spec.threads]
        assert not kernel.serialized and kernel.spilled <= 64, (variant, kernel.log)


def test_a_kernel_keeps_its_sums_in_registers():
    checked("ViT-S/16, 384 to 384", EPILOGUES["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CHAINS)
def test_every_kernel_keeps_its_sums_in_registers(name, dtype, epilogue):
    checked(name, epilogue, dtype)


# What it computes, by its text on the host.

PITCH = 8  # numbers between rows of x, and of y
SMALL = {
    "two l, blocks of 32 features each": (UP[0], (1, 40, 192, 2)),
    "two l, of 24": ((2, 48, 72, 1), (1, 200, 48, 2)),
    "two groups": ((4, 16, 24, 1), (2, 24, 16, 2)),
    "three l, stages of several chunks": (DOWN[0], (1, 72, 128, 3)),
    "one l": CHAINS["d = 1"],
    "four l": CHAINS["d = 4"],
    "five l": CHAINS["d = 5"],
    "eight l": CHAINS["d = 8"],
    "halves of a block's columns": ((2, 96, 72, 1), (1, 104, 96, 2)),
    "16 l": ((4, 64, 64, 1), (1, 40, 16, 16)),
    "32 l": ((16, 64, 64, 1), (1, 40, 32, 32)),
    "64 l": ((16, 64, 40, 1), (1, 40, 16, 64)),
}
VARIANTS = [(name, index) for name in SMALL for index in (0, 1)]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


@pytest.mark.emulated
@pytest.mark.few(4)
@pytest.mark.parametrize("rows", [1, 67, 130, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("name, index", VARIANTS)
def test_products_are_those_of_the_factors(emulator, name, index, epilogue, dtype, rows):
    chain, kind = SMALL[name], getattr(torch, dtype)
    first, second = problems(chain, rows, dtype)
    columns, features = first.left.line, second.out.row
    first = first._replace(left=first.left._replace(line=columns + PITCH))
    second = second._replace(out=second.out._replace(row=features + PITCH))
    pair, gpu = Chain(first, second, epilogue), Gpu(ARCH, 1)
    choices = {(c["pairs"], c["groups"]): c for c in reversed(FusedChain().choices(pair, ARCH))}
    choice = sorted(choices.values(), key=lambda choice: -choice["pairs"])[index % len(choices)]
    lowered = FusedChain().launch(epilogue, pair, gpu, choice)
    torch.manual_seed(rows)
    x = torch.randn(rows, columns + PITCH).to(kind)
    weights = [(torch.randn(pattern) / pattern[2] ** 0.5).to(kind) for pattern in chain]
    bias, y = torch.randn(features).to(kind), torch.full((rows + 3, features + PITCH), torch.nan)
    y, room = y.to(kind), torch.full((lowered.workspace + 16,), 255, dtype=torch.uint8)
    memory = {"x": x, "weight1": weights[0], "weight2": weights[1], "out": y, "vector0": bias}
    places = {name: t.data_ptr() for name, t in memory.items()}
    places["workspace"] = -(-room.data_ptr() // 16) * 16
    for step in lowered.steps:
        addresses = [places[name] + at for name, at in step.pointers]
        maps.launch(emulator, step, addresses, [0.75][: step.scalars])
    assert y[rows:].isnan().all() and y[:, features:].isnan().all()
    h = (x[:, :columns].double() @ reference.dense(chain[0], weights[0].double()).T).to(kind)
    exact = h.double() @ reference.dense(chain[1], weights[1].double()).T
    exact = reference.finish(epilogue, exact, {"bias": bias.double(), "scale": 0.75}, False)
    error = (y[:rows, :features].double() - exact).norm() / exact.norm()
    assert error <= {"float16": 3e-4, "bfloat16": 2.4e-3}[dtype]
