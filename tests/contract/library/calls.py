"""Calls as tests make and compare them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from tests.contract.library.cases import Call, Operation, tuple_of, values

EXACT = (0.0, 0.0)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def targets(graph_module) -> list[str]:
    """What a graph calls, and graphs within it, such as those under no_grad."""
    graphs = [one.graph for one in graph_module.modules() if isinstance(one, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    return [str(node.target) for node in nodes if node.op == "call_function"]


def slopes(results, tensors) -> tuple[torch.Tensor, ...]:
    """Gradients of the results by the tensors that require one, along random directions."""
    kept = [y for y in tuple_of(results) if y.requires_grad]
    leaves = [t for t in tensors if getattr(t, "requires_grad", False)]
    return torch.autograd.grad(kept, leaves, [along(y) for y in kept])


def along(y: torch.Tensor) -> torch.Tensor:
    return values(*y.shape, seed=9).to(y.dtype)


def close(found, wanted, near: tuple[float, float], strides: bool = True) -> None:
    """Equal but for rounding, with the same dtypes and strides."""
    for ours, theirs in zip(tuple_of(found), tuple_of(wanted), strict=True):
        rtol, atol = near
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, check_stride=strides)


def same(operation: Operation, call: Call, run, recording: bool) -> None:
    """``run`` gives what the call gives, and with ``recording`` its gradients."""
    near = call.near or operation.near
    plain = call.run(*call.leaves())
    ours, theirs = call.leaves(recording), call.leaves(recording)
    found = run(*ours)
    if not recording:
        assert not any(y.requires_grad for y in tuple_of(found))
        return close(found, plain, near.plain)
    close(tuple(y.detach() for y in tuple_of(found)), plain, near.recorded)
    by_autograd = slopes(call.run(*theirs), theirs)
    close(slopes(found, ours), by_autograd, near.slopes, operation.strides)
