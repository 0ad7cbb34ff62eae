"""A kernel: one class on the host and one header on the device.

The class says which problems the kernel takes, how long each takes and how it is launched; and it
generates the text in front of the header: the facts, as ``struct Config``; the numbers that a plan
fixes, as ``struct Fixed``; the epilogue, as ``struct Finish``. A family's kernels are the classes
of the modules in its package ``kernels``, of which :func:`choose` takes one for a problem.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import product
from math import inf
from typing import Any, ClassVar, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import config
from kernlib.lowering.steps import Lowered

Choice = dict[str, Any]  # the name of a kernel, as "kind", and the values of its knobs


class Gpu(NamedTuple):
    """What a kernel is chosen for: a compile target, and how many multiprocessors there are."""

    arch: str
    multiprocessors: int


class Kernel:
    """One kernel. Subclasses set the class variables and write the methods; they hold no state.

    ``role`` is what the kernel computes, where a family has several primitives. ``name`` is what a
    choice calls it. ``header`` is its device code, below ``kernel_sources``, and ``entry`` the
    function that this defines. ``rank`` puts the kernels of one role in order, of which
    :func:`choose` takes the first among equally fast ones. ``reason`` is what `kernlib explain`
    says of when it is chosen. ``Variant`` is a NamedTuple of all that decides its code besides the
    subject.

    The *subject* is what users wrote and what no size changes: a descriptor or its epilogue. The
    *problem* is one call's sizes, strides and dtypes. The *scope* is what is known of problems that
    are still to come, where kernels are compiled ahead: dtypes, sizes of blocks, the target.
    """

    role: ClassVar[str] = ""
    name: ClassVar[str]
    header: ClassVar[str]
    entry: ClassVar[str]
    rank: ClassVar[int] = 0
    reason: ClassVar[str] = "by rule"
    Variant: ClassVar[Any]

    def takes(self, problem: Any, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        raise NotImplementedError

    def choices(self, problem: Any, arch: str) -> list[Choice]:
        """The values of its knobs for a problem that it takes, by preference; one at least."""
        return [{}]

    def default(self, problem: Any, gpu: Gpu) -> Choice:
        """The choice of a problem that a rule makes, where there is no estimate."""
        return self.choices(problem, gpu.arch)[0]

    def pays(self, problem: Any, gpu: Gpu) -> bool:
        """Whether, by rule, it goes before kernels of a later rank."""
        return True

    def estimate(self, problem: Any, choice: Mapping[str, Any], gpu: Gpu) -> float:
        """Microseconds of a problem by a choice. Here, of a kernel with rules in the place of an
        estimate, zero for what they take and infinite for all else."""
        chosen = dict(choice) == self.default(problem, gpu) and self.pays(problem, gpu)
        return 0.0 if chosen else inf

    def launch(self, subject: Any, problem: Any, gpu: Gpu, choice: Mapping[str, Any]) -> Lowered:
        """The launches of a problem. Raises UnsupportedError for sizes that no grid can hold."""
        raise NotImplementedError

    def axes(self, subject: Any, scope: Any) -> Mapping[str, Iterable]:
        """The values of each member of Variant that some problem of a scope may need."""
        raise NotImplementedError

    def is_legal(self, variant: Any, subject: Any, scope: Any) -> bool:
        """Whether some problem needs these values together."""
        return True

    def spec(self, subject: Any, variant: Any, arch: str) -> KernelSpec:
        """The specification of a variant."""
        raise NotImplementedError

    def variants(self, subject: Any, scope: Any) -> Iterator[Any]:
        """Every variant that :meth:`launch` may choose in a scope: the legal product of axes."""
        axes = self.axes(subject, scope)
        for values in product(*(axes[name] for name in self.Variant._fields)):
            variant = self.Variant(*values)
            if self.is_legal(variant, subject, scope):
                yield variant

    def specs(self, subject: Any, scope: Any, arch: str) -> list[KernelSpec]:
        """The specifications of all variants of a scope, each once."""
        every = (self.spec(subject, variant, arch) for variant in self.variants(subject, scope))
        return list(dict.fromkeys(every))

    def source(
        self, facts: Mapping[str, config.Fact], *texts: str, includes: Iterable[str] = ()
    ) -> str:
        """The generated text: what the types of facts need, ``struct Config``, further texts, and
        the header. Raises KernlibError if the header reads a fact that is not there."""
        needed = [f'#include "{name}"' for name in ("common/types.cuh", *includes)]
        facts_text = config.of_header(self.header, facts)
        parts = (*needed, facts_text, *texts, f'#include "{self.header}"')
        return "\n".join([*parts, ""])

    def named_spec(
        self,
        source: str,
        threads: int,
        shared_bytes: int,
        dtype: str,
        words: list[str],
        epilogue: tuple[Epilogue, ...] = (),
        precision: str = "",
        options: tuple[str, ...] = (),
    ) -> KernelSpec:
        """The specification of a source that defines ``entry``; names and descriptions of variants
        say their dtype, its precision if it is float32, and ``words``."""
        from kernlib.lowering.product_source import describe  # which not every family needs

        family, entry = self.header.split("/")[0], self.entry
        line = describe(family, self.name, dtype, precision, words, epilogue)
        spec = KernelSpec(family, source, entry, threads, shared_bytes, options, line)
        said = [precision] * (dtype == "float32" and bool(precision))
        return named(spec, dtype, *said, *words, epilogue=epilogue)


class Option(NamedTuple):
    """One way to compute a problem: a kernel and the values of its knobs."""

    kernel: Kernel
    knobs: Choice

    @property
    def choice(self) -> Choice:
        """As tuning stores it, which times all options of a problem and keeps one."""
        return {"kind": self.kernel.name, **self.knobs}


@cache
def kernels(package: str, role: str = "") -> tuple[Kernel, ...]:
    """The kernels of a role that a package or a module has classes of, by rank and name."""
    among = [kind for kind in classes(package) if kind.role == role]
    return tuple(kind() for kind in sorted(among, key=lambda kind: (kind.rank, kind.name)))


@cache
def classes(package: str) -> frozenset[type[Kernel]]:
    """The classes of kernels that a module, or the modules of a package, define; what has no header
    is the base of some."""
    modules = pkgutil.iter_modules(getattr(import_module(package), "__path__", ()))
    names = [f"{package}.{module.name}" for module in modules if not module.ispkg] or [package]
    values = [value for name in names for value in vars(import_module(name)).values()]
    kinds = (each for each in values if isinstance(each, type) and issubclass(each, Kernel))
    return frozenset(kind for kind in kinds if hasattr(kind, "header") and kind.__module__ in names)


def specs(among: Iterable[Kernel], subject: Any, scope: Any, arch: str) -> list[KernelSpec]:
    """The specifications of all variants of some kernels, each once."""
    every = (spec for kernel in among for spec in kernel.specs(subject, scope, arch))
    return list(dict.fromkeys(every))


def options(among: Iterable[Kernel], problem: Any, arch: str) -> list[Option]:
    """Every way to compute a problem by some kernels, in their order."""
    takers = (kernel for kernel in among if kernel.takes(problem, arch))
    return [Option(taker, knobs) for taker in takers for knobs in taker.choices(problem, arch)]


def candidates(among: Iterable[Kernel], problem: Any, arch: str) -> list[Choice]:
    """The choices of :func:`options`."""
    return [option.choice for option in options(among, problem, arch)]


def match(choice: Mapping[str, object] | None, every: Iterable[Option]) -> Option | None:
    """The option of a choice, whose values may be text. None if there is none, as for a choice that
    is damaged or of another version."""
    text = {name: str(value) for name, value in (choice or {}).items()}
    same = (o for o in every if {name: str(value) for name, value in o.choice.items()} == text)
    return next(same, None)


def choose(
    among: Iterable[Kernel], problem: Any, gpu: Gpu, tuned: Mapping[str, object] | None = None
) -> Option | None:
    """The option that was tuned for a problem, if it is one of those there are; else the one of the
    least estimate, of equals the first. None where no kernel takes the problem."""
    every = options(among, problem, gpu.arch)
    option = match(tuned, every) if tuned else None
    if option is not None or len(every) < 2:
        return option or next(iter(every), None)
    return min(every, key=lambda option: option.kernel.estimate(problem, option.knobs, gpu))


def named(spec: KernelSpec, *words: object, epilogue: tuple[Epilogue, ...] = ()) -> KernelSpec:
    """The spec with a longer entry name, as profilers show it:
    ``kernlib_sparse_slices_u4_float16_8x2_bias_gelu``. The spec's entry has named family and kernel
    so far; ``words`` add dtype, tile and whatever else tells variants apart. Device code keeps the
    short name, which a ``#define`` replaces."""
    epilogues = (type(part).__name__ for part in epilogue)
    said = re.findall(r"[a-z0-9]+", " ".join([*map(str, words), *epilogues]).lower())
    name = "_".join(["kernlib", spec.entry, *said])
    return spec._replace(entry=name, source=f"#define {spec.entry} {name}\n{spec.source}")
