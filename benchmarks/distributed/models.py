"""Models over several GPUs of one host, beside one of them alone: attention of one long sequence,
and steps of a vision transformer whose batches each GPU has of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import relative_error
from benchmarks.distributed.timing import compared, shared, size

LENGTH, HEADS, FEATURES, BLOCK = 65536, 16, 128, 128
WINDOW, GLOBAL = 1024, 4  # positions on each side, and blocks that see, and are seen by, all
BATCH, PIXELS, CLASSES = 128, 224, 1000  # of a GPU


def attention_case(must: float) -> Case:
    name = (
        f"context parallel attention {LENGTH} {HEADS}x{FEATURES} window={WINDOW} "
        f"global={GLOBAL} {{}} GPUs"
    )

    def measure(session: Session) -> Row:
        mask = kl.blocksparse.sliding_window(LENGTH, BLOCK, WINDOW).mask()
        mask[:GLOBAL], mask[:, :GLOBAL] = True, True
        layout = kl.blocksparse.Layout(mask, BLOCK, device="cuda")
        shard = kl.distributed.sequence_shards(layout, size())[dist.get_rank()]
        alone = [
            shared(1, HEADS, LENGTH, FEATURES + at)[..., :FEATURES].bfloat16() for at in range(4)
        ]
        spread = [t[:, :, shard[0] : shard[-1] + 1].contiguous() for t in alone]

        def step(call, q, k, v, grad) -> list[torch.Tensor]:
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = call(*leaves, layout)
            out.backward(grad)
            return [out.detach(), *(t.grad for t in leaves)]

        def error() -> float:
            exact = step(kl.blocksparse.attention, *alone)
            places = slice(int(shard[0]), int(shard[-1]) + 1)
            results = step(kl.distributed.attention, *spread)
            return max(
                relative_error(out, reference[:, :, places].double())
                for out, reference in zip(results, exact, strict=True)
            )

        return compared(
            name.format(size()),
            lambda: step(kl.blocksparse.attention, *alone),
            lambda: step(kl.distributed.attention, *spread),
            error,
            must,
        )

    return Case(name, measure)


def ddp_case(must: float) -> Case:
    """Each GPU has a batch, so that all of them have ``size`` times the work of one."""
    name = f"ddp ks vit {BATCH} a GPU {{}} GPUs"

    def measure(session: Session) -> Row:
        import timm

        torch.manual_seed(0)
        model = timm.create_model("vit_small_patch16_224", num_classes=CLASSES).cuda()
        kl.nn.replace_linear(model, kl.nn.VIT_S16)
        images = shared(BATCH, 3, PIXELS, PIXELS)
        labels = torch.arange(BATCH, device="cuda") % CLASSES
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(forward) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = cross_entropy(forward(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        parallel = DistributedDataParallel(model)
        return compared(
            name.format(size()), lambda: step(model), lambda: step(parallel), None, must / size()
        )

    return Case(name, measure)
