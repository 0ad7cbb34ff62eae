"""Products that are recorded twice while Dynamo traces a program become one.

Layers of a group ask for the same product, one after the other. When the second request is in the
graph, the node of the first is looked for behind it, and if nothing can have changed what it reads,
the second one becomes a view of the first. The program that is compiled keeps nothing between
calls, and where this finds no earlier product it computes both.

What a product reads: the tensors of its arguments, whose fake tensors count the writes that have
been traced so far, and grad mode, autocast and inference mode, which Dynamo sets as it traces. Some
writes are not counted, such as those through ``.data``. So whatever takes a tensor in the memory of
one that the product reads must also be one of READERS, which only read. Nothing is merged across
operators of higher order, and across those that say that they write their arguments.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

_STATE = "kernlib_product"  # of the node of a product: what was so when it was traced
_MOST_NODES = 500  # that are looked at
# Methods and functions of torch and operator. Views are among them: writes to these take the view.
READERS = frozenset(
    (
        "add", "bfloat16", "cat", "contiguous", "dim", "dropout", "float", "getitem", "half",
        "linear", "matmul", "mean", "mul", "numel", "permute", "pow", "reshape", "shape", "size",
        "stride", "sub", "sum", "sym_size", "to", "transpose", "type_as", "unsqueeze", "view",
    )
)  # fmt: skip


def merged(y: torch.Tensor) -> torch.Tensor:
    """``y``, the result of a product that Dynamo has just traced."""
    from torch._dynamo.comptime import comptime  # it is there, as Dynamo traces the call

    comptime(_merge)
    return y


def _merge(context) -> None:
    node = context.get_local("y").as_proxy().node
    from kernlib.families.sparse.operators import _traced

    if node.op != "call_function" or node.target is not _traced:
        return
    state = _state(node)
    if state is None:
        return
    node.meta[_STATE] = state
    memory, earlier = _memory(_leaves(node)), node.prev
    for _ in range(_MOST_NODES):
        if earlier.op == "root" or _may_write(earlier, memory):
            return
        if earlier.meta.get(_STATE) == state and _is_same(earlier.args, node.args):
            node.target, node.args, node.kwargs = operator.getitem, (earlier, (Ellipsis,)), {}
            del node.meta[_STATE]
            return
        earlier = earlier.prev


def _state(node: torch.fx.Node) -> tuple | None:
    """The versions of all tensors that a product reads, and the modes. None where torch does not
    count them."""
    versions = []
    for argument in _leaves(node):
        value = argument.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            if value.is_inference():
                return None
            versions.append(value._version)
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return (
        tuple(versions), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocast)
    )  # fmt: skip


def _leaves(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that a product reads; in place of biases that are joined for it these biases."""
    nodes = []
    for argument in node.all_input_nodes:
        nodes += argument.all_input_nodes if argument.target is torch.cat else [argument]
    return nodes


def _is_same(a: Any, b: Any) -> bool:
    """Whether arguments are the same nodes and values, or the same ones joined."""
    if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node):
        return a is b or (a.target is b.target is torch.cat and _is_same(a.args, b.args))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and a == b


def _memory(nodes: list[torch.fx.Node]) -> set[int]:
    """The storages of nodes' tensors."""
    values = [node.meta.get("example_value") for node in nodes]
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}


def _may_write(node: torch.fx.Node, memory: set[int]) -> bool:
    """Whether a node may write to memory without a fake tensor's counting it."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if node.meta.get(_STATE) is not None or memory.isdisjoint(_memory(node.all_input_nodes)):
        return False
    if isinstance(target, str):
        return target not in READERS
    origin = (getattr(target, "__module__", None) or "").partition(".")[0]
    return origin not in ("torch", "_operator") or getattr(target, "__name__", "") not in READERS
