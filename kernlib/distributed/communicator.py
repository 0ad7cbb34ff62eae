"""The processes of a job: what they agree on before a call, and how rows move between them.

Data moves as bytes by the group of the user, over NCCL for CUDA tensors and gloo for those of a
CPU. What a call is about is compared over gloo, in a group of the same processes beside it: that
asks nothing of a GPU, and a process that is gone ends the call with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from kernlib.alone import Alone
from kernlib.descriptors.base import shown
from kernlib.distributed.agreement import agreement_of, difference, refused
from kernlib.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | Communicator | None"

TIMEOUT = 60.0  # seconds
# torch 2.13 warns of the former name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """The processes of a group, each of which holds a part of the rows.

    - ``group``: a ``ProcessGroup``, a one-dimensional ``DeviceMesh``, or None for all processes.
    - ``timeout``: seconds after which a process that does not take part in a call is given up.
    - ``rank``, ``size``: the place of this process in the group, and how many there are.

    Calls take it in place of a group. All processes of the group make it.

    Raises TypeError for other groups, ValueError for a mesh of several dimensions, a group that
    this process is no member of and a timeout that is not greater than 0, RuntimeError before
    ``torch.distributed.init_process_group``.

    Example:
        >>> kl.distributed.Communicator(timeout=10.0)  # doctest: +SKIP
        Communicator(rank=0, size=2, timeout=10.0)
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float = TIMEOUT
    ):
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"timeout must be seconds, greater than 0, got {shown(timeout)}")
        self.group = _group_of(group)
        self.timeout = float(timeout)
        self.rank, self.size = self.group.rank(), self.group.size()
        self._processes: Processes | None = None  # which calls make

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, timeout={self.timeout})"


class Processes(Communicator):
    """A communicator as calls of this package use it. All processes call its methods in the same
    order."""

    def __init__(self, group, *, timeout: float = TIMEOUT):
        super().__init__(group, timeout=timeout)
        self._agreement = agreement_of(self.group, self.timeout)
        self.checked = self._agreement.checked

    @property
    def control(self) -> dist.ProcessGroup:
        """The group over gloo of the same processes."""
        return self._agreement.control(self.group, self.timeout)

    def check_device(self, name: str, t: torch.Tensor) -> None:
        """Raises TypeError for a tensor on a device that the group has no backend for."""
        backends = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        if t.device.type not in backends:
            raise TypeError(
                f"{name} is on {t.device}, and the group has backends for {', '.join(backends)}: "
                f'start it by init_process_group("cpu:gloo,cuda:nccl"), or move {name}'
            )

    def agree(
        self,
        task: str,
        texts: Callable[[], dict[str, str]],
        sizes: Callable[[], tuple[int, ...]] = tuple,
        key: Callable[[], Hashable] | None = None,
    ) -> list[tuple[int, ...]]:
        """What ``sizes`` returns in all processes, four numbers at most, by rank, once what
        ``texts`` returns is equal in all of them. That is called first; not at all where a call of
        an equal ``key`` has passed it.

        Raises what these raise here; ValueError that names the rank and what differs, or what
        another process refuses, in all processes; DistributedError for one that does not answer.
        """
        error, numbers = None, ()
        try:
            checked = self.checked(task, texts, key)
            numbers = sizes()
        except Exception as raised:  # the others must know, whatever it is
            error, checked = raised, refused(raised)
        try:
            control = self.control
            every = self._agreement.tell(error is not None, checked.digest, numbers)
            first = every[0][1]
            if not any([refuses or digest != first for refuses, digest, *_ in every]):
                return [row[2 : 2 + len(numbers)] for row in every]
            says: list = [None] * self.size
            dist.all_gather_object(says, (task, checked.texts), group=control)
        except RuntimeError as lost:
            raise self._lost(task) from lost
        if error is not None:
            raise error
        raise ValueError(difference(task, says))

    def collect(self, task: str, value: object) -> list:
        """The values of all processes, by rank, each of which can be pickled. Raises
        DistributedError for a process that does not answer."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.control)
        except RuntimeError as lost:
            raise self._lost(task) from lost
        return values

    def _lost(self, task: str) -> DistributedError:
        """The error for what gloo raises where a process is gone, or late."""
        return DistributedError(
            f"{task}: a process of the group does not take part, seen from rank {self.rank} of "
            f"{self.size}: it has ended, waits elsewhere, or is more than {self.timeout:g} s late "
            "(timeout)"
        )

    def gather(self, t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The rows of all processes, by rank, of which each holds so many of ``sizes``."""
        most, like = max(sizes), t.shape[1:]
        if not most or not t.shape[1:].numel():
            return t.new_empty((sum(sizes), *like))
        rows = t.contiguous()
        if t.shape[0] < most:  # what is gathered has one size
            rows = t.new_zeros((most, *like))
            rows[: t.shape[0]] = t
        every = t.new_empty((self.size * most, *like))
        _all_gather(_bytes(every), _bytes(rows), group=self.group)
        if min(sizes) == most:
            return every
        parts = every.view(self.size, most, *like)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def gather_several(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """What :meth:`gather` returns of each of them, by one exchange if they have one dtype."""
        if len(tensors) == 1 or len({t.dtype for t in tensors}) > 1:
            return [self.gather(t, sizes) for t in tensors]
        most = max(sizes)
        widths = [most * t.shape[1:].numel() for t in tensors]
        flat = [t.reshape(-1) for t in tensors]
        if len(tensors[0]) == most:
            packed = torch.cat(flat)
        else:
            packed = flat[0].new_zeros(sum(widths))
            for place, numbers in zip(packed.split(widths), flat, strict=True):
                place[: len(numbers)] = numbers
        every = packed.new_empty((self.size, sum(widths)))
        if sum(widths):
            _all_gather(_bytes(every), _bytes(packed), group=self.group)
        results = []
        for t, part in zip(tensors, every.split(widths, 1), strict=True):
            rows = part.view(self.size, most, *t.shape[1:])
            if min(sizes) < most:
                rows = torch.cat([some[:size] for some, size in zip(rows, sizes, strict=True)])
            results.append(rows.reshape(sum(sizes), *t.shape[1:]))
        return results

    def scatter_sum(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Of each tensor, which holds the rows of all processes, the rows of this one of the sum
        over all of them, by one exchange if they have one dtype. Summands are added by rank, so
        that bits repeat."""
        if len({t.dtype for t in tensors}) > 1:
            return [part for t in tensors for part in self.scatter_sum([t], sizes)]
        mine, like = sizes[self.rank], [t.shape[1:] for t in tensors]
        counts = [shape.numel() for shape in like]
        by_rank = zip(*(t.split(list(sizes)) for t in tensors), strict=True)
        flat = [part.reshape(-1) for parts in by_rank for part in parts]
        packed = torch.cat(flat) if len(tensors) > 1 else tensors[0].reshape(-1)
        width = sum(counts)
        sends, receives = [size * width for size in sizes], [mine * width] * self.size
        parts = packed.new_empty((self.size, mine * width))
        if sum(sends):
            _all_to_all(parts, packed, receives, sends, self.group)
        parts = parts.split([mine * count for count in counts], 1)
        return [_added(part).view(mine, *of) for part, of in zip(parts, like, strict=True)]

    def total(self, t: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' tensors, of one shape, added by rank."""
        every = self.gather(t.reshape(1, -1), [1] * self.size)
        return _added(every).view(t.shape)

    def exchange(
        self, packed: torch.Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> torch.Tensor:
        """Numbers that follow each other by rank: of ``packed`` each process is sent as many as
        ``sends`` says, and as many as ``receives`` come from each."""
        out = packed.new_empty(sum(receives))
        _all_to_all(out, packed, receives, sends, self.group)
        return out

    def pass_on(
        self, tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> Callable[[], list[torch.Tensor]]:
        """Begin to send tensors to the next process of the ring, and to take those of ``shapes``
        from the one before. The result waits for the latter."""
        after, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        received = [t.new_empty(shape) for t, shape in zip(tensors, shapes, strict=True)]
        sends = [
            dist.P2POp(dist.isend, _bytes(t.contiguous()), after, self.group)
            for t in tensors
            if t.numel()
        ]
        receives = [
            dist.P2POp(dist.irecv, _bytes(t), before, self.group) for t in received if t.numel()
        ]
        works = dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []

        def wait() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            return received

        return wait


class _One(Alone, Processes):
    """A group of one process."""

    check_device = Processes.check_device  # of which a group of several would be made


def as_communicator(group: Group) -> Processes:
    """Of what a call's ``group`` may be: a communicator, or what makes one."""
    if isinstance(group, Processes):
        return group
    if not isinstance(group, Communicator):
        return _processes(group, TIMEOUT)
    if group._processes is None:
        group._processes = _processes(group.group, group.timeout)
    return group._processes


def _processes(group, timeout: float) -> Processes:
    processes = Processes(group, timeout=timeout)
    return processes if processes.size > 1 else _One(group, timeout=timeout)


def _group_of(group) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: start the program by torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a mesh of one dimension, got {group.ndim}: take one by its name, "
                f"as mesh[{(group.mesh_dim_names or ('rows',))[0]!r}]"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group has this process not among its members")
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh of one dimension, a Communicator or None, "
            f"got {shown(group)}"
        )
    return group


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: not every backend takes every dtype."""
    return t.view(-1).view(torch.uint8)


def _all_to_all(out: torch.Tensor, packed: torch.Tensor, receives, sends, group) -> None:
    """Of contiguous tensors, whose numbers follow each other by rank."""
    width = packed.element_size()
    sizes = ([width * count for count in each] for each in (receives, sends))
    dist.all_to_all_single(_bytes(out), _bytes(packed), *sizes, group=group)


def _added(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, from the first summand on."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
