"""Cases of attention for kernels by wgmma."""

from tests.families.blocksparse.lowering.attention.cases import CASES, Case

# What wgmma takes: as many values as features.
WGMMA_CASES = {name: case for name, case in CASES.items() if case.features == case.values} | {
    "128": Case(block=(128, 128), queries=150, keys=300, features=64, values=64, density=0.7),
    "64": Case("bfloat16", (64, 64), 300, 270, 64, 64, density=0.5, layout="head"),
    "32": Case("bfloat16", (32, 32), 130, 100, 48, 48),
    "16": Case(density=0.3, layout="head", queries=80, keys=400),
    "128 features": Case(queries=70, keys=330, features=128, values=128, heads=1, kv_heads=1),
    "tall blocks": Case("bfloat16", (128, 32), 200, 128, 48, 48),
    "causal of many tiles": Case(
        "bfloat16", (64, 64), 450, 400, 16, 16, 2, 4, 2, causal=True, density=0.8
    ),
    "all at once": Case(
        "bfloat16", (32, 32), 100, 120, 72, 72, 2, 4, 2, 0.7, "head", True, (40, 60), True, 0.2
    ),
    "256 features": Case(
        block=(32, 128), queries=70, keys=150, features=256, values=256, heads=1, kv_heads=1
    ),
    "136 features": Case(queries=70, keys=90, features=136, values=136, heads=1, kv_heads=1),
    "no scale": Case(scale=0.0),
}
