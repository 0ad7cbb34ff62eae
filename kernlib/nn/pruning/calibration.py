"""Statistics of the inputs of layers over batches, block by block: each block gets the outputs of
the pruned blocks in front of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from kernlib.descriptors.base import shown as in_words
from kernlib.errors import warn
from kernlib.nn.pruning.targets import Target
from kernlib.progress import shown


class Statistic(Protocol):
    """A statistic of a layer's inputs, and the number of their rows."""

    rows: int

    def add(self, x: torch.Tensor) -> None: ...


class _Stop(BaseException):
    """Ends a pass of the model once the inputs of its last block are there. No Exception, so that
    no model handles it."""


class _NoChain(BaseException):
    """The blocks of a model are not called one after the other, each with what the one in front
    of it returned."""


Call = tuple[list[Any], Any, dict[int, int]]  # leaves, their tree, former results among them


@torch.no_grad()
def prune_by_inputs(
    task: str,
    model: nn.Module,
    batches: Iterable[Any],
    targets: list[Target],
    statistic: Callable[[Target], Statistic],
    prune: Callable[[Target, Any], None],
    progress: bool | None,
) -> list[Target]:
    """Call ``prune`` with each target and the statistic of its inputs, and return those that were
    called. Warns of the others, which stay as they are."""
    if progress is not None and type(progress) is not bool:
        raise TypeError(f"progress must be True, False or None, got {in_words(progress)}")
    inputs = as_list(batches)
    pruned: list[Target] = []

    def stage(here: list[Target], run: Callable[[], None]) -> None:
        statistics = [statistic(target) for target in here]
        with _hooked(here, statistics):
            run()
        for target, figures in zip(here, statistics, strict=True):
            if figures.rows:
                prune(target, figures)
                pruned.append(target)

    with _evaluation(model):
        names, blocks = _blocks_of(model, targets)
        calls = _recorded(model, blocks, inputs)
        inside = _inside(blocks if calls else [], targets)
        covered = {target.layer for here in inside for target in here}
        rest = [target for target in targets if target.layer not in covered]
        with shown(progress, task, len(inside) + bool(rest)) as bar:
            for place, here in enumerate(inside):
                work = partial(_of_block, blocks[place], calls, place, here, stage)
                bar.count(names[place], work)
            if rest:
                bar.count("other layers", partial(stage, rest, partial(_run_all, model, inputs)))
    _warn_of_uncalled(task, targets, pruned)
    return pruned


def as_list(batches: Iterable[Any]) -> list[Any]:
    """The batches, which are gone through once. Raises TypeError for what is no iterable of
    batches, ValueError for an empty one."""
    if isinstance(batches, (torch.Tensor, Mapping, str, bytes)) or not isinstance(
        batches, Iterable
    ):
        is_single = isinstance(batches, (torch.Tensor, Mapping))
        advice = ", one batch: pass [batches]" if is_single else ""
        raise TypeError(
            f"batches must be an iterable of inputs of the model, got {in_words(batches)}{advice}"
        )
    inputs = list(batches)
    if not inputs:
        raise ValueError("batches is empty: there must be inputs to calibrate by")
    for index, batch in enumerate(inputs):
        if not isinstance(batch, (torch.Tensor, tuple, list, Mapping)):
            raise TypeError(
                f"batches[{index}] must be a tensor, a tuple of arguments or a dict of keyword "
                f"arguments, got {in_words(batch)}"
            )
    return inputs


def _call(model: nn.Module, index: int, batch: Any) -> None:
    """Run the model. Raises ValueError for a batch that it refuses."""
    try:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, (tuple, list)):
            model(*batch)
        else:
            model(batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"batches[{index}]: {type(model).__name__} does not take it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _run_all(model: nn.Module, inputs: list[Any]) -> None:
    for index, batch in enumerate(inputs):
        _call(model, index, batch)


# Where the blocks are, and what they are called with.


def _blocks_of(model: nn.Module, targets: list[Target]) -> tuple[list[str], list[nn.Module]]:
    """The ModuleList that holds most of the weights to prune, with the names of its modules; of
    lists that hold as many the outermost. Empty where there is none, or a module stands in it
    twice."""
    sizes = {target.layer: target.weight.numel() for target in targets}
    most, best = 0, ([], [])
    for name, part in model.named_modules():
        if not isinstance(part, nn.ModuleList):
            continue
        count = sum(sizes.get(layer, 0) for layer in part.modules())
        if count > most:
            prefix = f"{name}." if name else ""
            most, best = count, ([f"{prefix}{i}" for i in range(len(part))], list(part))
    blocks = best[1]
    return best if len(set(blocks)) == len(blocks) else ([], [])


def _inside(blocks: list[nn.Module], targets: list[Target]) -> list[list[Target]]:
    """The targets of each block that stand in no other."""
    parts = [set(block.modules()) for block in blocks]
    holders = Counter(layer for part in parts for layer in part)
    return [
        [target for target in targets if target.layer in part and holders[target.layer] == 1]
        for part in parts
    ]


def _recorded(
    model: nn.Module, blocks: list[nn.Module], inputs: list[Any]
) -> list[list[Call]] | None:
    """The calls of all blocks by each batch, in a pass of the model as it is. Of what a block
    returns, the next one's call has the places alone. None where the blocks are no chain."""
    if not blocks:
        return None
    calls = []
    for index, batch in enumerate(inputs):
        try:
            calls.append(_calls_of(model, blocks, index, batch))
        except _NoChain:
            return None
    return calls


def _calls_of(model: nn.Module, blocks: list[nn.Module], index: int, batch: Any) -> list[Call]:
    calls: list[Call] = []
    # What the block that runs is called with, and how often that was written.
    inputs: list[Any] = []
    versions: list[int] = []
    results: list[Any] = []  # of the block in front

    def before(place: int, args: tuple, kwargs: dict) -> None:
        if place != len(calls):
            raise _NoChain
        leaves, tree = tree_flatten((args, kwargs))
        versions[:] = _versions(leaves)
        links = {}
        for at, leaf in enumerate(leaves if place else ()):
            same = [i for i, result in enumerate(results) if result is leaf]
            if isinstance(leaf, torch.Tensor) and same:
                links[at] = same[0]
        if place and not links:
            raise _NoChain
        calls.append(
            ([None if at in links else leaf for at, leaf in enumerate(leaves)], tree, links)
        )
        # The whole pass of the first batch shows whether a block is called twice.
        if index and len(calls) == len(blocks):
            raise _Stop
        inputs[:] = leaves

    def after(result: Any) -> None:
        if versions != _versions(inputs):  # a block that writes its inputs cannot run twice
            raise _NoChain
        results[:] = tree_leaves(result)

    with ExitStack() as stack:
        for place, block in enumerate(blocks):
            first = block.register_forward_pre_hook(
                lambda _, args, kwargs, place=place: before(place, args, kwargs), with_kwargs=True
            )
            last = block.register_forward_hook(lambda _, args, result: after(result))
            stack.callback(first.remove)
            stack.callback(last.remove)
        with suppress(_Stop):
            _call(model, index, batch)
    if len(calls) != len(blocks):
        raise _NoChain
    return calls


def _versions(leaves: list[Any]) -> list[int]:
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _of_block(
    block: nn.Module,
    calls: list[list[Call]],
    place: int,
    targets: list[Target],
    stage: Callable[[list[Target], Callable[[], None]], None],
) -> None:
    """Prune the layers of a block, then put what it returns into the calls of the next one."""

    def run() -> Iterator[Any]:
        for sample in calls:
            leaves, tree, _ = sample[place]
            args, kwargs = tree_unflatten(leaves, tree)
            yield sample, block(*args, **kwargs)

    def run_all() -> None:
        for _ in run():
            pass

    if targets:
        stage(targets, run_all)
    if place + 1 < len(calls[0]):
        for sample, result in run():
            results = tree_leaves(result)
            leaves, _, links = sample[place + 1]
            for at, source in links.items():
                leaves[at] = results[source]
            sample[place] = ([], None, {})  # this block is not called again


# What is as in generation from dense weights, but without caches, while the model runs.


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in which transformers' models fill no cache, as a block runs more than once,
    and torch's encoders call their layers."""
    modes = [(part, part.training) for part in model.modules()]
    configs = {id(c): c for part in model.modules() if (c := getattr(part, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        _set_caches(caching, False)
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        _set_caches(caching, True)
        for part, training in modes:
            part.training = training


def _set_caches(configs: list[Any], value: bool) -> None:
    for config in configs:
        with suppress(AttributeError):  # of values that cannot be written
            config.use_cache = value


@contextmanager
def _hooked(targets: list[Target], statistics: list[Statistic]) -> Iterator[None]:
    """Each call of a layer adds its input to the layer's statistic."""
    with ExitStack() as stack:
        for target, statistic in zip(targets, statistics, strict=True):

            def add(_, args: tuple, kwargs: dict, statistic=statistic) -> None:
                statistic.add((*args, *kwargs.values())[0])

            handle = target.layer.register_forward_pre_hook(add, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _warn_of_uncalled(task: str, targets: list[Target], pruned: list[Target]) -> None:
    called = {target.name for target in pruned}
    missed = [target.name for target in targets if target.name not in called]
    if missed:
        some = ", ".join(map(repr, missed[:3])) + (", ..." if len(missed) > 3 else "")
        warn(
            f"{task} leaves {len(missed)} of {len(targets)} layers as they are, which no batch "
            f"reaches: {some}. Pass batches that do, or leave these layers out by match"
        )
