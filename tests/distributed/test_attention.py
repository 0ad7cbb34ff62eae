"""Attention over a sequence that processes share: the result and gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import kernlib as kl

LENGTH, BLOCK = 112, 16  # seven blocks, which neither two nor three processes share evenly
BATCH, HEADS, FEATURES = 2, 4, 8


def window(**options):
    return kl.blocksparse.sliding_window(LENGTH, BLOCK, (24, 0)), {"window": (24, 0), **options}


def everything_sees_the_first_block(**options):
    """And the first block everything: its rows' queries are sent, not all keys."""
    mask = torch.eye(7) > 0
    mask[0], mask[:, 0] = True, True
    return kl.blocksparse.Layout(mask, BLOCK), options


def causal(**options):
    return kl.blocksparse.dense(LENGTH, LENGTH, BLOCK), {"causal": True, **options}


def of_heads(**options):
    mask = torch.rand(4, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[:, 2] = False  # rows without columns
    mask[:, 5] = True
    return kl.blocksparse.Layout(mask, BLOCK), options


def of_heads_of_each_batch(**options):
    mask = torch.rand(BATCH * HEADS, 7, 7, generator=torch.Generator().manual_seed(3)) < 0.5
    return kl.blocksparse.Layout(mask, BLOCK), options


def of_two_blocks(**options):
    """So that one of three processes has nothing."""
    return kl.blocksparse.Layout([[1, 0], [1, 1]], BLOCK), options


def of_other_keys(**options):
    mask = torch.rand(5, 3, generator=torch.Generator().manual_seed(2)) < 0.6
    return kl.blocksparse.Layout(mask, (16, 32)), {"causal": True, **options}


CASES = {
    "window": (window, {}),
    "global": (everything_sees_the_first_block, {}),
    "global, balanced": (everything_sees_the_first_block, {"balanced": True}),
    "causal, balanced": (causal, {"balanced": True}),
    "heads": (of_heads, {}),
    "window, balanced": (window, {"balanced": True}),
    "a process without positions": (of_two_blocks, {}),
    "other keys": (of_other_keys, {}),
    "mask": (window, {"mask": "row % 3 != col % 5"}),
    "lengths": (
        everything_sees_the_first_block,
        {"q_lengths": torch.tensor([112, 70]), "kv_lengths": torch.tensor([50, 112])},
    ),
    "heads of each batch": (of_heads_of_each_batch, {}),
    "axes in another order": (
        window,
        {
            "mask": "kept > 0.2",
            "kept": torch.rand(LENGTH, BATCH, generator=torch.Generator().manual_seed(4)),
            "axes": {"kept": ("col", "batch")},
        },
    ),
    "lse": (of_heads, {"return_lse": True}),
    "score": (window, {"score": "v - slope * (row - col)", "axes": {"slope": "head"}}),
}


def tensors(layout, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and a gradient."""
    generator = torch.Generator().manual_seed(0)
    (rows, cols), heads = layout.shape, (HEADS, kv_heads, kv_heads, HEADS)
    return [
        torch.randn(BATCH, count, length, FEATURES, generator=generator, dtype=dtype)
        for count, length in zip(heads, (rows, cols, cols, rows), strict=True)
    ]


def shards_of(layout, balanced: bool = False) -> list[torch.Tensor]:
    """Positions of this process, of what :func:`tensors` returns."""
    rows, cols = (
        kl.distributed.sequence_shards(layout, dist.get_world_size(), dim=dim, balanced=balanced)[
            dist.get_rank()
        ]
        for dim in (0, 1)
    )
    return [rows, cols, cols, rows]


def local(drawn, shards) -> list[torch.Tensor]:
    return [t[:, :, shard] for t, shard in zip(drawn, shards, strict=True)]


def step(call, q, k, v, grad, layout, options):
    """Results, and gradients by q, k, v and a slope."""
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    if "score" in options:
        inputs.append(
            torch.linspace(0.1, 0.4, HEADS, dtype=q.dtype, device=q.device).requires_grad_()
        )
        options = {**options, "slope": inputs[3]}
    outs = call(*inputs[:3], layout, **options)
    outs = outs if isinstance(outs, tuple) else (outs,)
    finite = [torch.where(out.isfinite(), out, 0) for out in outs]
    loss = (finite[0] * grad).sum() + sum(out.square().sum() for out in finite[1:])
    return [*(out.detach() for out in outs), *torch.autograd.grad(loss, inputs)]


def worst(
    case: str, kv_heads: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> float:
    """The largest of the errors of results and gradients, by those of one process in float64."""
    make, options = CASES[case]
    layout, options = make(**options)
    layout = layout.to(device)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    shards = shards_of(layout, options.get("balanced", False))
    drawn = [t.to(device) for t in tensors(layout, kv_heads, dtype)]
    spread = step(kl.distributed.attention, *local(drawn, shards), layout, options)
    alone = {name: value for name, value in options.items() if name != "balanced"}
    exact = step(kl.blocksparse.attention, *(t.double() for t in drawn), layout, alone)
    apart = 0.0
    results = len(exact) - (3 if "score" not in options else 4)
    places = [shards[0]] * results + shards[:3] + [None] * ("score" in options)
    for out, reference, place in zip(spread, exact, places, strict=True):
        if place is not None:
            reference = reference[:, :, place]
        assert out.shape == reference.shape
        assert torch.equal(out.isfinite(), reference.isfinite())
        error = torch.where(reference.isfinite(), out - reference, 0).norm()
        apart = max(apart, float(error / max(1.0, float(exact[0].norm()))))
    return apart


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_attention_of_one_process(pool, case):
    for kv_heads in (4, 2):
        for answer in pool.run(worst, case, kv_heads):
            if isinstance(answer, Exception):
                raise answer
            assert answer < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_are_merged_in_every_type(pool, dtype):
    bound = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for answer in pool.run(worst, "global", 4, dtype):
        if isinstance(answer, Exception):
            raise answer
        assert answer < bound


def sent(case: str) -> tuple[int, int]:
    """How many numbers this process sends of q, k and v, and of partial results."""
    from kernlib.distributed.communicator import Processes

    counts, exchange = [], Processes.exchange

    def counted(self, packed, sends, receives):
        counts.append(sum(sends) // 8)
        return exchange(self, packed, sends, receives)

    make, options = CASES[case]
    layout, options = make(**options)
    q, k, v, _ = local(tensors(layout, HEADS, torch.float64), shards_of(layout))
    Processes.exchange = counted
    try:
        with torch.no_grad():
            kl.distributed.attention(q, k, v, layout, **options)
    finally:
        Processes.exchange = exchange
    return tuple(counts)


def test_a_window_sends_its_border_alone(pool):
    """24 columns to the left are two blocks, of k and v, and no partial results."""
    answers = pool.run(sent, "window")
    width = BATCH * HEADS * FEATURES
    assert answers[0] == (2 * 2 * BLOCK * width,)
    assert answers[-1] == (0,)


def dropped() -> float:
    """The part of the probabilities that is dropped; the others are divided by what stays."""
    layout, _ = everything_sees_the_first_block()
    shards = shards_of(layout)
    q, k, _, _ = tensors(layout, HEADS, torch.float64)
    v = torch.eye(LENGTH, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    exact = kl.blocksparse.attention(q, k, v, layout)[:, :, shards[0]]
    some = kl.distributed.attention(*local((q, k, v), shards[:3]), layout, dropout_p=0.25, seed=3)
    is_stored, is_dropped = exact != 0, some == 0
    torch.testing.assert_close(some, torch.where(is_dropped, 0, exact / 0.75))
    return float((is_dropped & is_stored).sum() / is_stored.sum())


def test_probabilities_are_dropped_in_every_part(pool):
    for answer in pool.run(dropped):
        if isinstance(answer, Exception):
            raise answer
        assert abs(answer - 0.25) < 0.02


def drawn_twice() -> bool:
    """What torch's generator drops is the same behind the same seed, whatever was called before."""
    layout, _ = window()
    operands = local(tensors(layout, HEADS, torch.float64)[:3], shards_of(layout)[:3])
    results = []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())
        results.append(kl.distributed.attention(*operands, layout, dropout_p=0.5))
    return torch.equal(*results)


def test_a_generator_drops_alike_in_a_first_call_and_later_ones(pool):
    assert pool.run(drawn_twice) == [True] * 3


def of_one_sequence() -> torch.Size:
    layout, _ = window()
    q, k, v = local([t[:1] for t in tensors(layout, 4, torch.float64)[:3]], shards_of(layout)[:3])
    return kl.distributed.attention(q, k, v, layout, kv_lengths=torch.tensor([50])).shape


def test_lengths_of_one_sequence(pool):
    assert [shape[0] for shape in pool.run(of_one_sequence)] == [1, 1, 1]


def written() -> float:
    layout, _ = everything_sees_the_first_block()
    drawn = tensors(layout, HEADS, torch.float64)[:3]
    shards = shards_of(layout)[:3]
    kl.distributed.attention(*local(drawn, shards), layout)
    mask = layout.mask()
    mask[0, 3:], mask[5, 2] = False, False
    layout.update_(mask)
    exact = kl.blocksparse.attention(*drawn, layout)[:, :, shards[0]]
    return float((kl.distributed.attention(*local(drawn, shards), layout) - exact).abs().max())


def test_a_layout_may_be_written_between_calls(pool):
    for answer in pool.run(written):
        if isinstance(answer, Exception):
            raise answer
        assert answer < 1e-12


def wrong(name: str):
    layout, options = window()
    rank = dist.get_rank()
    q, k, v, _ = local(tensors(layout, HEADS, torch.float64), shards_of(layout))
    if name == "positions" and rank == 1:
        q = q[:, :, 1:]
    if name == "layout" and rank == 1:
        mask = layout.mask()
        mask[6, 6] = False
        layout = kl.blocksparse.Layout(mask, BLOCK, capacity=layout.capacity)
    if name == "window" and rank == 1:
        options = {"window": (23, 0)}
    if name == "equal window":  # of a call that has passed
        kl.distributed.attention(q, k, v, layout, **options)
        options = {"window": (24.0, 0)} if rank == 1 else options
    if name == "lengths":
        options["q_lengths"] = torch.tensor([200, 5])
    if name == "autocast":
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
            return kl.distributed.attention(q, k, v, layout, **options)
    if name == "score":
        options["score"] = "v + row *"
    return kl.distributed.attention(q, k, v, layout, **options)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("positions", "rank 1 .*q must have"),
        ("layout", "contents of layout differs"),
        ("window", "window differs"),
        ("score", "score"),
        ("equal window", "rank 1 .*window must be"),
        ("lengths", "q_lengths must be from 0 to the 112"),
        ("autocast", "autocast differs: off on rank 0"),
    ],
)
def test_differences_are_errors_in_all_processes(pool, name, text):
    for rank, answer in enumerate(pool.run(wrong, name)):
        assert isinstance(answer, (TypeError, ValueError))
        pattern = text.replace("rank 1 .*", "") if rank == 1 else text
        with pytest.raises((TypeError, ValueError), match=pattern):
            raise answer


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_shards_are_each_position_once(size, balanced):
    layout, _ = window()
    shards = kl.distributed.sequence_shards(layout, size, balanced=balanced)
    assert torch.cat(shards).sort().values.tolist() == list(range(LENGTH))
    assert all(len(shard) % BLOCK == 0 for shard in shards)
