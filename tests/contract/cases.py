"""What a case of a bad call is: an entry's valid arguments with one or two of them replaced, left
out or added, and how its outcome is judged."""

from __future__ import annotations

import contextlib
import copy
import io
import linecache
import random
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import kernlib
from kernlib.blocksparse import Layout
from kernlib.errors import KernlibError
from kernlib.sparse import SparseMatrix
from tests.contract import wrong

PACKAGE = str(Path(kernlib.__file__).parent)
# RuntimeErrors that are documented: of gradients, transforms of torch.func, and empty layers.
SAID = re.compile(
    r"requires a gradient|takes no (result|gradient)|inside a transform|is empty: load|"
    r"torch\.half|was not started|gradient"
)
# What is right, and beyond this machine: a size, and a device that layers are asked for.
BEYOND = re.compile(
    r"can't allocate memory|out of memory|Storage size calculation|not compiled with CUDA|"
    r"invalid device ordinal|Cannot access accelerator|Found no NVIDIA driver|"
    r"Could not run 'aten::empty"
)
BINDING = re.compile(
    r"unexpected keyword argument|required (positional|keyword-only) argument|positional argument|"
    r"multiple values"
)
# What a message says that would do, and what an argument was.
ADVICE = re.compile(
    r"\b(must|pass|give|takes?|use|needs?|call|write|make|clone|leave|rename|say|says|load|"
    r"compress|detach|dequantize|pad|set|move|tune|name|known are|supported modes are|"
    r"does not parse|is no regular expression|has no argument)\b|did you mean",
    re.IGNORECASE,
)
FACT = re.compile(
    r"\b(got|is|are|was|has|have|holds?|shares?|overlaps|requires|lacks|left|missing|unexpected|no|"
    r"needs?|both|does not|computes|reduces|more than|given with)\b|: meta"
)
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float32: 1e-3, torch.float64: 1e-6}


class Context(NamedTuple):
    """What makes the arguments of a case: its random numbers and its device."""

    random: random.Random
    device: str

    def randn(self, *shape: int, dtype=torch.float32) -> torch.Tensor:
        made = torch.Generator().manual_seed(self.random.randrange(1 << 40))
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(self.device, dtype)

    def float_type(self) -> torch.dtype:
        kinds = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
        return self.random.choice(kinds)


class Entry(NamedTuple):
    """A public function: what makes valid arguments of it by name, in order, of which those before
    ``named`` are given by position; the kind of each that is no tensor; and ``wanted``, which gives
    the right result of the same arguments, or raises for wrong ones."""

    call: Callable
    arguments: Callable[[Context], dict]
    positional: int = 0
    kinds: dict[str, str] = {}  # noqa: RUF012
    wanted: Callable | None = None
    names: tuple[str, ...] = ()  # what errors may name besides the arguments
    weight: int = 1


class Outcome(NamedTuple):
    fault: str  # "" for a good one
    shown: str  # the call in words
    error: Exception | None = None  # that it raised


def run(entry: Entry, name: str, seed: int, index: int, device: str = "cpu") -> Outcome:
    """One case, decided by the seed and its index."""
    context = Context(random.Random(f"{seed} {name} {index}"), device)
    given = entry.arguments(context)
    changed, words = _change(entry, given, context)
    shown = f"{name}({', '.join(words) or 'valid'})"
    before = {key: _copy(value) for key, value in given.items()}
    keys = [*given]
    by_position = keys[: min(entry.positional, len(keys))]
    for place, key in enumerate(by_position):  # behind one that is missing nothing has a place
        if key not in [*entry.arguments(Context(random.Random(0), device))][place : place + 1]:
            by_position = by_position[:place]
            break
    rest = {key: value for key, value in given.items() if key not in by_position}
    silent = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(silent):
            warnings.simplefilter("ignore")
            found = entry.call(*(given[key] for key in by_position), **rest)
            if device != "cpu":
                torch.cuda.synchronize()
    except Exception as error:
        return Outcome(_fault_of(error, entry, given, changed), shown, error)
    return Outcome(_fault_of_result(entry, found, before, changed), shown)


def _change(entry: Entry, given: dict, context: Context) -> tuple[dict, list[str]]:
    """Replace one or two arguments in ``given``; what was done to which."""
    chance, changed, words = context.random.random(), {}, []
    if chance < 0.08 or not given:
        return changed, words
    if chance < 0.11:
        given["nosuch"] = 1
        return {"nosuch": "added"}, ["nosuch added"]
    if chance < 0.15:
        key = context.random.choice([*given])
        del given[key]
        return {key: "left out"}, [f"{key} left out"]
    count = 1 if chance < 0.85 else 2
    for key in context.random.sample([*given], min(count, len(given))):
        tensors = [k for k, v in given.items() if k != key and isinstance(v, torch.Tensor)]
        if key == "out" and tensors and context.random.random() < 0.3:
            other = context.random.choice(tensors)
            label, value = f"memory of {other}", _view_of(given[other], given[key])
        else:
            kind = entry.kinds.get(key, "tensor")
            label, value = wrong.instead(kind, given[key], context.random)
        given[key], changed[key] = value, label
        words.append(f"{key}: {label}")
    return changed, words


def _view_of(memory: torch.Tensor, like):
    """A view of a tensor's memory in the shape of another, as far as that goes."""
    try:
        return memory.detach().reshape(-1)[: like.numel()].view(like.shape)
    except (RuntimeError, AttributeError):
        return memory


def _copy(value):
    """On the host, where it has values; of a list or a tuple each."""
    try:
        if type(value) in (list, tuple):
            return type(value)(_copy(each) for each in value)
        if isinstance(value, SparseMatrix):
            return value.to("cpu")
        if isinstance(value, Layout):
            return copy.deepcopy(value)
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone() if value.is_meta else value.detach().clone().cpu()
    except Exception:  # of what has no values
        return value


# Errors.


def _fault_of(error: Exception, entry: Entry, given: dict, changed: dict) -> str:
    kind, text = type(error).__name__, str(error)
    short = f"{kind}: {text.splitlines()[0][:160] if text else ''}"
    if BEYOND.search(text):
        return ""
    if _raised_by_given(error):
        return ""  # by a function that was an argument
    if not changed:
        return f"a valid call raised {short} at {_place(error)}"
    known = (ValueError, TypeError, NotImplementedError, KernlibError, torch.linalg.LinAlgError)
    if not isinstance(error, known) and not (type(error) is RuntimeError and SAID.search(text)):
        return f"{short} at {_place(error)}"
    names = {*given, *changed, *entry.names}
    names |= {name.rpartition(".")[2] for name in names}
    if isinstance(error, TypeError) and BINDING.search(text):
        return "" if _names_one(text, names) else f"names no argument: {short}"
    if not raised_by_kernlib(error):
        return f"not kernlib's own {short} at {_place(error)}"
    if not _names_one(text, names):
        return f"names no argument: {short} at {_place(error)}"
    if isinstance(error, (NotImplementedError, torch.linalg.LinAlgError)):
        return ""  # of what nothing would do
    if not ADVICE.search(text):
        return f"says not what would do: {short} at {_place(error)}"
    return "" if FACT.search(text) else f"says not what was wrong: {short} at {_place(error)}"


def _names_one(text: str, names: set[str]) -> bool:
    for name in names:
        escaped = re.escape(name)
        verb = r"( (must|and|is|has|requires|are|to|of|on|shares|takes|needs|holds)\b|'s|,|:|=|')"
        pattern = rf"\b{escaped}\b{verb}" if len(name) == 1 else rf"\b{escaped}\b"
        if re.search(pattern, text):
            return True
    return False


def raised_by_kernlib(error: BaseException) -> bool:
    """Whether a raise statement of the package made it, and not what that called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno).strip()
    return last.filename.startswith(PACKAGE) and line.startswith(("raise ", "warnings.warn"))


def _raised_by_given(error: BaseException) -> bool:
    """Whether code of an argument raised it: a function, or a tensor's own dispatcher, of which
    torch's functions know no more."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.name == "__torch_dispatch__":
        return Path(last.filename).name == "wrong.py"
    return Path(last.filename).name.startswith("of_") and last.name == "<lambda>"


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PACKAGE in f.filename]
    if not frames:
        return "the call itself"
    return f"{frames[-1].filename.removeprefix(PACKAGE)}:{frames[-1].lineno}"


# Results.


def _fault_of_result(entry: Entry, found, before: dict, changed: dict) -> str:
    if "nosuch" in changed:
        return "an unknown argument was taken"
    if entry.wanted is None:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = entry.wanted(**before)
    except Exception as error:
        return f"a result, where plain torch has {type(error).__name__}: {str(error)[:120]}"
    founds = found if isinstance(found, (tuple, list)) else (found,)
    wanteds = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
    try:
        faults = [_difference(*pair) for pair in zip(founds, wanteds, strict=False)]
    except RuntimeError as error:
        return f"a result that cannot be compared: {str(error)[:120]}"
    return next(filter(None, faults), "")


def _difference(found, wanted) -> str:
    if wanted is None:
        return ""
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__} in the place of a tensor"
    if tuple(found.shape) != tuple(wanted.shape):
        return f"shape {tuple(found.shape)} in the place of {tuple(wanted.shape)}"
    if found.is_meta or wanted.is_meta or type(found).__name__ == "FakeTensor":
        return ""
    tolerance = TOLERANCE.get(found.dtype, 0)
    x, y = (t.detach().to("cpu", torch.float64) for t in (found, wanted))
    limit = torch.finfo(found.dtype).max / 8 if found.dtype.is_floating_point else 2**62
    known = y.abs() < limit  # beyond, rounding decides between a number, inf and NaN
    known &= torch.isfinite(y) & (y.abs() > 1e-30)
    scale = float(y[known].abs().max()) if known.any() else 1.0
    off = (x - y).abs()[known]
    wrong = ~(off <= tolerance * scale)
    return f"wrong by {float(off.max()):.2g} of {scale:.2g}" if wrong.any() else ""
