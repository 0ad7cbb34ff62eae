"""kermac's helpers: a timer, how a tensor lies in memory, kernels compiled ahead."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import NamedTuple

import torch

from kernlib import ahead
from kernlib.compat.kermac._descriptors import KernelDescriptor, KernelType, PowerType
from kernlib.descriptors.base import as_int, check_flag, shown
from kernlib.errors import UnsupportedError
from kernlib.runtime import devices
from kernlib.runtime.tensors import check_layout

# Points and features of the calls that are compiled ahead: either tile, K short and long, with
# and without lengths that forbid 16-byte loads.
_SIZES = tuple(
    (points + odd, features + odd)
    for points in (256, 8192)
    for features in (64, 1024)
    for odd in (0, 1)
)


class CudaTimer:
    """Milliseconds between :meth:`start` and :meth:`stop` on the current stream; a context manager
    too, which leaves them in ``elapsed``. On a machine without a GPU the clock's."""

    def __init__(self):
        self.elapsed = 0.0
        self._begun = None

    def start(self) -> None:
        """Begin, or begin again."""
        self._begun = _mark()

    def stop(self) -> float:
        """The milliseconds since start, after waiting for the device. Raises RuntimeError for a
        timer that was not started."""
        if self._begun is None:
            raise RuntimeError("the timer was not started; call start() first")
        ended = _mark()
        if isinstance(ended, float):
            self.elapsed = (ended - self._begun) * 1e3
        else:
            ended.synchronize()
            self.elapsed = self._begun.elapsed_time(ended)
        self._begun = None
        return self.elapsed

    def __enter__(self) -> CudaTimer:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()


def _mark() -> torch.cuda.Event | float:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Majorness(Enum):
    """Which elements of a matrix are neighbours: those of a column, or those of a row."""

    COL_MAJOR = auto()
    ROW_MAJOR = auto()


class Alignment(Enum):
    """Elements that one load may take."""

    ALIGN_1 = auto()
    ALIGN_4 = auto()


class TensorStats(NamedTuple):
    """What :func:`tensor_stats` says of a tensor.

    - ``shape``: three sizes, a batch of 1 in front if there is none; ``num_batches`` is the first.
    - ``majorness``, ``alignment``: a :class:`Majorness` and an :class:`Alignment`.
    - ``batch_stride``, ``leading_dimension_stride``: in elements; the first is 0 for a batch of 1.
    """

    shape: tuple[int, int, int]  # a batch of 1 in front, if there is none
    majorness: Majorness
    alignment: Alignment
    num_batches: int
    batch_stride: int  # in elements; 0 for a batch of 1
    leading_dimension_stride: int


def tensor_stats(tensor: torch.Tensor) -> TensorStats:
    """How ``tensor``, a float32 one (M, N) or (L, M, N) lies in memory. ``ALIGN_4`` says that loads
    of 16 bytes may read it: its address, leading dimension and batch stride are multiples of them.

    Raises TypeError for another dtype and for what is no tensor, ValueError for another rank and
    for strides that are neither row- nor column-major.
    """
    if isinstance(tensor, torch.Tensor):
        check_layout("tensor", tensor)
    if getattr(tensor, "dtype", None) != torch.float32:
        kind = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"tensor must be a float32 tensor, got {kind}")
    if tensor.dim() not in (2, 3):
        raise ValueError(f"tensor must have 2 or 3 dimensions, got shape {tuple(tensor.shape)}")
    batched = tensor if tensor.dim() == 3 else tensor[None]
    (count, rows, columns), (step, row, column) = batched.shape, batched.stride()
    if column == 1 and row >= columns:
        majorness = Majorness.ROW_MAJOR
    elif row == 1 and column >= rows:
        majorness = Majorness.COL_MAJOR
    else:
        raise ValueError(
            f"tensor must be row- or column-major, got shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}"
        )
    step, lead = step if count > 1 else 0, max(row, column)
    aligned = not (tensor.data_ptr() % 16 or lead % 4 or step % 4)
    alignment = Alignment.ALIGN_4 if aligned else Alignment.ALIGN_1
    return TensorStats((count, rows, columns), majorness, alignment, count, step, lead)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, for an int ``a`` and an int ``b`` greater than 0. Raises TypeError for
    what is no int, ValueError for another b."""
    a, b = as_int("a", a), as_int("b", b)
    if b <= 0:
        raise ValueError(f"b must be greater than 0, got {b}")
    return -(-a // b)


def pre_compile_descriptors(
    device: torch.device | str | int | None,
    descriptors: KernelDescriptor | Iterable[KernelDescriptor],
    try_to_align: bool = False,
    debug: bool = False,
) -> None:
    """Compile into the cache the kernels of ``descriptors``, a :class:`KernelDescriptor` or
    several, for float32 tensors of each layout, row- or column-major, and the GPU ``device`` (None:
    the current one). Of exponents the code that serves all is made, not that of 1, 2 and the other
    values with their own. ``try_to_align`` is ignored, as alignment is found out at each call;
    ``debug=True`` writes events to stderr.

    Raises UnsupportedError for a device that is no GPU, TypeError for what is no descriptor, and
    what :func:`kernlib.compile` raises.
    """
    check_flag("try_to_align", try_to_align)
    check_flag("debug", debug)
    single = isinstance(descriptors, KernelDescriptor)
    if not single and not isinstance(descriptors, Iterable):
        raise TypeError(f"descriptors must be KernelDescriptors, got {shown(descriptors)}")
    listed = (descriptors,) if single else tuple(descriptors)
    for descriptor in listed:
        if not isinstance(descriptor, KernelDescriptor):
            raise TypeError(f"descriptors must be KernelDescriptors, got {shown(descriptor)}")
    arch = devices.arch_of(_index(device))
    jobs = []
    for descriptor in listed:
        pairwise, arguments = descriptor.pairwise, _arguments(descriptor)
        for a, b, out in _layouts():
            specs = ahead.specs(pairwise, arch, (a, b), {"out": out} | arguments)
            jobs += [(spec, arch) for spec in specs]
    ahead.build_all(jobs, None, True if debug else None)


def _index(device: torch.device | str | int | None) -> int:
    try:
        if type(device) is int:
            place = torch.device("cuda", device)
        else:
            place = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be one of torch's, got {shown(device)}") from None
    if place.type != "cuda":
        raise UnsupportedError(f"kernels are compiled for a GPU, and device is {device!r}")
    if place.index is not None:
        return place.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _arguments(descriptor: KernelDescriptor) -> dict[str, float]:
    """Hyperparameters of a call, exponents that have no code of their own."""
    arguments = {"inner_p": 1.3} if descriptor.inner_power is PowerType.POW else {}
    arguments |= {"outer_p": 0.7} if descriptor.outer_power is PowerType.POW else {}
    if len(arguments) == 2:  # the outer one as the reciprocal of the inner: another kernel
        arguments = {"p": 1.3}
    return arguments | ({} if descriptor.kernel_type is KernelType.NONE else {"bandwidth": 1.0})


def _layouts() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tensors without data of every layout: a, b and out."""
    for points, features in _SIZES:
        for number in range(8):
            a = _meta(points, features, number & 1)
            b = _meta(points, features, number & 2)
            yield a, b, _meta(points, points, number & 4)


def _meta(rows: int, columns: int, column_major: int) -> torch.Tensor:
    if column_major:
        return torch.empty(columns, rows, dtype=torch.float32, device="meta").mT
    return torch.empty(rows, columns, dtype=torch.float32, device="meta")
