"""Layers whose features are dealt out to the processes of a mesh, as styles of torch's
``parallelize_module``. Loaded at first use, as it loads ``torch.distributed.tensor``."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise

from kernlib.distributed.communicator import as_communicator
from kernlib.distributed.splitting import Part, facts_of, part_of
from kernlib.nn.activations import activate, as_steps
from kernlib.nn.indexed import IndexedModule

__all__ = ("ColwiseParallel", "RowwiseParallel")


class ColwiseParallel(TorchColwise):
    """Deal out the output features of a layer, for ``torch.distributed.tensor.parallel``'s
    ``parallelize_module``: with W of n parts ``W_r``, process r computes ``activation(x W_r^T +
    bias_r)``.

    - ``input_layouts``: the placement of an input that is no DTensor, by default Replicate().
    - ``output_layouts``: that of the result, by default Shard(-1): each process has its features.
    - ``use_local_output``: whether the result is a tensor, else a DTensor.

    These are torch's own style's, which does the same for ``nn.Linear`` and ``nn.Embedding``; so
    one plan serves a mixed model. Gradients of the input are summed over processes. Calls take the
    input by position, and come from one thread at a time.

    - ``SparseLinear``: rows of the matrix. ``out_features`` must divide by the processes.
    - ``BlockSparseLinear``: rows of blocks. ``out_features`` must divide, into whole blocks.
    - ``KroneckerLinear``: columns of ``factors[0]``. ``out_sizes[0]`` must divide.
    - ``KSLinear``: the last factor (a, b, c, d). Its a must divide; or a = 1, and b divides.

    Of a Kronecker-sparse chain factors before a last one with a = 1 stay whole; a last one that is
    dealt out by its blocks ``a`` has the factor before it dealt out likewise. Factors that stay
    whole have gradients that are summed over processes.

    The layer is changed in place. Its parameters become DTensors, with the values that process 0 of
    the mesh has (``src_data_rank`` of ``parallelize_module``), so that states of
    ``torch.distributed.checkpoint`` fit any number of processes. Matrix and layout are constants,
    which must be equal in all processes; afterwards the ``matrix`` or ``layout`` of each is its
    part, which a state_dict holds under a name that says whose it is, such as
    ``weight_packed_0_of_2``. A state with these fits as many processes only, which another number
    answers with an error of missing keys. The ``weight`` of a ``BlockSparseLinear`` becomes one
    DTensor of the values of all parts, each filled up to the largest. What changes blocks in place,
    ``reset_parameters`` of layers with a matrix, and conversions such as ``to_linear`` come before.

    Raises, in all processes: TypeError for other layers; ValueError for sizes that cannot be dealt
    out, a layer that is dealt out already or has parametrizations, a mesh of several dimensions,
    and layers that differ, naming the rank; DistributedError for a process that does not answer.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> plan = {"up": kl.distributed.ColwiseParallel(),  # doctest: +SKIP
        ...         "down": kl.distributed.RowwiseParallel()}
        >>> parallelize_module(model, init_device_mesh("cuda", (8,)), plan)  # doctest: +SKIP
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            return super()._apply(module, device_mesh)
        return _split(self, module, device_mesh, by_rows=False)


class RowwiseParallel(TorchRowwise):
    """Deal out the input features of a layer, for ``torch.distributed.tensor.parallel``'s
    ``parallelize_module``: process r has the part ``x_r`` of the features, and the result is
    ``activation(sum_r x_r W_r^T + bias)``.

    - ``input_layouts``: the placement of an input that is no DTensor, by default Shard(-1), as
      :class:`ColwiseParallel` leaves it.
    - ``output_layouts``: that of the result, by default Replicate(): the sum is an all-reduce, of
      Shard() a reduce-scatter.
    - ``use_local_output``: whether the result is a tensor, else a DTensor.

    Of ``nn.Linear`` and ``nn.Embedding`` it is torch's own style. Bias and activation follow the
    sum, in each process, as steps of torch. Dealt out are the columns of a ``SparseLinear``'s
    matrix, columns of blocks of a ``BlockSparseLinear``, rows of ``factors[0]`` of a
    ``KroneckerLinear`` (``in_sizes[0]`` must divide), and of a ``KSLinear`` the first factor (a, b,
    c, d), by a, or with a = 1 by c; a first one that is dealt out by ``a`` has the factor behind it
    dealt out likewise. All else is as of :class:`ColwiseParallel`.

    Raises what that raises, and ValueError for ``output_layouts`` that are neither Replicate nor
    Shard.

    Example:
        >>> kl.distributed.RowwiseParallel(use_local_output=False)  # doctest: +SKIP
        RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Replicate(),), ...)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            return super()._apply(module, device_mesh)
        return _split(self, module, device_mesh, by_rows=True)


def _split(style, module: nn.Module, mesh: DeviceMesh, by_rows: bool) -> nn.Module:
    """Change a layer in place into this process's part."""
    processes, parts = as_communicator(mesh), []

    def texts() -> dict[str, str]:
        if any(isinstance(p, DTensor) for p in module.parameters()) or _calls_of(module):
            raise ValueError(
                f"module is a {type(module).__name__} that is dealt out or sharded already: "
                "parallelize_module comes once, and before fully_shard"
            )
        layouts = style.output_layouts
        if by_rows and not isinstance(layouts[0], (Replicate, Shard)):
            raise ValueError(f"output_layouts must be Replicate() or Shard(), got {layouts[0]}")
        parts.append(part_of(module, by_rows, processes.rank, processes.size))
        return {"layouts": f"{style.input_layouts} to {layouts}", **facts_of(module)}

    processes.agree(type(style).__name__, texts)
    part: Part = parts[0]
    part.take()
    for name, (value, dim) in part.values.items():
        placement = Replicate() if dim is None else Shard(dim)
        dealt = distribute_tensor(
            value.detach(), mesh, [placement], src_data_rank=style.src_data_rank
        )
        owner, _, last = name.rpartition(".")
        parameter = nn.Parameter(dealt, requires_grad=value.requires_grad)
        module.get_submodule(owner).register_parameter(last, parameter)
    calls = _Calls(style, module, part, mesh, by_rows)
    module.register_forward_pre_hook(calls.begin)
    module.register_forward_hook(calls.end, always_call=True)
    module.register_state_dict_pre_hook(calls.settle)
    if isinstance(module, IndexedModule):
        module._save_as_share(processes.rank, processes.size)
    return module


def _calls_of(module: nn.Module) -> list[_Calls]:
    """What splits the calls of a layer, if anything does."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, _Calls)]


class _Calls:
    """The calls of a layer, with what this process has in the place of what the layer has."""

    def __init__(self, style, module: nn.Module, part: Part, mesh: DeviceMesh, by_rows: bool):
        self.attributes, self.mesh, self.by_rows = part.attributes, mesh, by_rows
        # Parameters of which each process has all, but by which it has a summand of the gradient.
        self.summed = {name for name, (_, dim) in part.values.items() if dim is None}
        self.names = tuple(part.values)
        self.input_layouts, self.output_layouts = style.input_layouts, style.output_layouts
        self.use_local_output = style.use_local_output
        self.reads = Shard(-1) if part.reads_part else Replicate()
        self.writes = Partial() if part.adds_up else Shard(-1)
        self.steps = as_steps(module.activation) if by_rows else ()
        self.before: list[tuple[dict, str, Any]] = []  # what is put back
        self.thread: dict[str, int] = {}  # whose call the layer is in

    def begin(self, module: nn.Module, inputs: tuple) -> tuple:
        """The input of this process; the layer is its part until :meth:`end`."""
        self.settle()
        this = threading.get_ident()
        if self.thread.setdefault("id", this) != this:  # which is one step, between threads too
            raise RuntimeError(
                f"a {type(module).__name__} that is dealt out is in a call of another thread: call "
                "it from one thread at a time"
            )
        if not inputs or not isinstance(inputs[0], torch.Tensor):
            got = type(inputs[0]).__name__ if inputs else "none by position"
            raise TypeError(f"input must be a tensor, the first argument of the call, got {got}")
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, self.input_layouts, run_check=False)
        gradients = [Partial()] if self.reads == Replicate() else None
        x = x.redistribute(placements=[self.reads]).to_local(grad_placements=gradients)
        for name in self.names:
            owner, _, last = name.rpartition(".")
            parameters = module.get_submodule(owner)._parameters
            self._put(parameters, last, self._local(name, parameters[last]))
        for name, value in self.attributes.items():
            self._put(module.__dict__, name, value)
        return (x, *inputs[1:])

    def end(self, module: nn.Module, inputs: tuple, result: torch.Tensor | None):
        """The result in the layout that was asked for. Without one the call has failed."""
        self.settle()
        if not isinstance(result, torch.Tensor):
            return None
        y = DTensor.from_local(result, self.mesh, [self.writes], run_check=False)
        y = y.redistribute(placements=self.output_layouts)
        if not self.by_rows or (module.bias is None and not self.steps):
            return y.to_local() if self.use_local_output else y
        local, shape, stride = y.to_local(), y.shape, y.stride()
        if module.bias is not None:
            local = local + self._bias(module.bias, y).to(local.dtype)
        local = activate(self.steps, local)
        if self.use_local_output:
            return local
        options = {"run_check": False, "shape": shape, "stride": stride}
        return DTensor.from_local(local, self.mesh, self.output_layouts, **options)

    def settle(self, *_) -> None:
        """Put back what a call of this thread has put into the layer. One that was interrupted has
        left it there: torch calls its hooks behind an Exception alone."""
        if self.thread.get("id") == threading.get_ident():
            for owner, name, value in reversed(self.before):
                owner[name] = value
            self.before.clear()
            self.thread.clear()

    def _put(self, owner: dict, name: str, value: Any) -> None:
        self.before.append((owner, name, owner[name]))
        owner[name] = value

    def _local(self, name: str, p: Any) -> Any:
        """What the part computes with in the place of a parameter. A bias behind a sum is no part
        of it."""
        if name == "bias" and self.by_rows:
            return None
        if not isinstance(p, DTensor):  # somebody has put it there for this call
            return p
        return _summed(p) if name in self.summed else p.to_local()

    def _bias(self, bias: torch.Tensor, y: DTensor) -> torch.Tensor:
        """What this process adds to its part of a result."""
        (placement,) = self.output_layouts
        if not isinstance(bias, DTensor):  # as in _local
            options = {"device_mesh": self.mesh, "placements": [Replicate()], "run_check": False}
            bias = DTensor.from_local(bias, **options)
        if isinstance(placement, Replicate):
            return bias.to_local()
        if placement.dim in (-1, y.dim() - 1):
            return bias.redistribute(placements=[Shard(0)]).to_local()
        return _summed(bias)  # of other rows than those of other processes


def _summed(p: DTensor) -> torch.Tensor:
    """The tensor that each process has, whose gradient is the sum of all of theirs."""
    same = p.redistribute(placements=[Replicate()])  # so that the sum is made in the backward pass
    return same.to_local(grad_placements=[Partial()])
