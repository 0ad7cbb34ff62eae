"""The key of a kernel: all that decides its code, and nothing else."""

import hashlib
import itertools
import os
import subprocess
import sys

import pytest

from kernlib.jit import entry, layers, service, sources, toolchain, tuning
from kernlib.jit.spec import KernelSpec
from tests.jit.service_cases import ARCH, SPEC
from tests.support.limits import LIMIT_S


def test_the_scheme_of_keys_is_that_of_every_earlier_release(monkeypatch):
    """The canonical bytes, the portable and the exact key. What they are made of is held still, so
    that only another scheme changes them: it empties every user's cache."""
    monkeypatch.setattr(sources, "digest", lambda source: hashlib.sha256(b"a header").digest())
    monkeypatch.setattr(sources, "system_includes", lambda source: frozenset())
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.0.88")
    monkeypatch.setattr(toolchain, "cuda_major", lambda: "13")
    monkeypatch.setattr(toolchain, "OPTIONS", ("c++17",))
    monkeypatch.setattr(entry, "SCHEMA", 1)
    source = '#include "x.cuh"\nusing T = float;\n'
    spec = KernelSpec("pairwise", source, "pairwise", 256, 49152, ("-O3",), "words")
    wanted = layers.request_of(spec, ARCH)
    canonical = hashlib.sha256(wanted.spec.canonical()).digest()
    assert [digest.hex() for digest in (canonical, wanted.portable, wanted.key)] == [
        "218acb7579809a4a7b39adfc7a1eae02e266ed8a91d763b76dc00839f7c000d2",
        "b472c9f27fdb8a6029a173c89468824bdaa6e57a6804fe4c86801c2cc31f2826",
        "46b652d2d9e199f17ca7fdd51234b1cb433ed8289bbad91b329e8d7fbbddd858",
    ]


def test_the_digest_of_headers_is_that_of_every_earlier_release(tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.cuh").write_text('#include "b.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "b.cuh").write_text("// b\n")
    monkeypatch.setattr(sources, "root", lambda: tmp_path)
    sources._digest_of.cache_clear(), sources.read.cache_clear()
    try:
        found = sources.digest('#include "common/a.cuh"\n').hex()
    finally:
        monkeypatch.undo()
        sources.forget()
    assert found == "f960b49524186f709ab1ff4a65615d2b920374eba86bfd9031f82eeb70fb3e55"


def test_the_key_of_a_tuning_result_is_that_of_every_earlier_release():
    found = tuning._key("pairwise", ("NVIDIA H200", 132), b"signature").hex()
    assert found == "e167a28ec825ef4f6c0fa2dcfed318117b5fb68045108d97119ac1d7d14990b8"


ALIKE = [1, "1", True, 1.0, b"1", (1,), None, "", 0, False, "True", "1.0"]


def test_what_is_not_the_same_makes_different_keys():
    """Values that look alike in options of the compiler, threads and bytes of shared memory, texts
    that would run together, and each other field."""
    specs = [SPEC, SPEC._replace(source=SPEC.source + " ")]
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "")]
    specs += [SPEC._replace(family=family, entry=name) for family, name in pairs]
    specs += [SPEC._replace(options=options) for options in (("ab", "c"), ("a", "bc"), ("abc",))]
    specs += [SPEC._replace(options=(value,)) for value in ALIKE]
    specs += [SPEC._replace(threads=value, shared_bytes=other)
              for value, other in itertools.permutations(ALIKE[:4], 2)]  # fmt: skip
    assert len({service.digest(spec, ARCH) for spec in specs}) == len(specs)


def test_the_key_changes_with_arch_compiler_options_and_schema(monkeypatch):
    keys = {
        service.digest(SPEC, ARCH),
        service.digest(SPEC, "sm_90"),
        service.digest(SPEC, "sm_80"),
    }
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "99.9.9")
    keys.add(service.digest(SPEC, ARCH))
    monkeypatch.setattr(toolchain, "OPTIONS", ("--std=c++20",))
    keys.add(service.digest(SPEC, ARCH))
    monkeypatch.setattr(entry, "SCHEMA", 99)
    keys.add(service.digest(SPEC, ARCH))
    assert len(keys) == 6


def test_the_key_ignores_the_description():
    other = SPEC._replace(description="x")
    assert service.digest(other, ARCH) == service.digest(SPEC, ARCH)
    assert layers.request_of(other, ARCH).spec.description == "x"


LOWERED_CHILD = """
import hashlib
import kernlib as kl
from kernlib.jit import service
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering.problem import Scope
digest = hashlib.sha256()
chain = (kl.Laplace(), kl.Custom("tanh(gain * v) + shift", ("shift", "gain")))
for descriptor in (kl.p_distance(), kl.polynomial(3), kl.l1_distance(epilogue=chain)):
    for spec in DIRECT.specs(descriptor, Scope(("float32", "float16"), "sm_90a"), "sm_90a"):
        digest.update(service.digest(spec, "sm_90a"))
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_what_is_lowered_has_the_same_keys_under_every_hash_seed(tmp_path):
    seeds = ("0", "1", "77")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LOWERED_CHILD],
            cwd=tmp_path,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in seeds
    ]
    keys = {child.communicate(timeout=LIMIT_S)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0] and len(keys) == 1
