"""A pruned language model, letter by letter.

A network that predicts the next letter of a text is trained densely; then each weight keeps only
its entries of largest magnitude, a part `density` of them, and `kernlib.nn.sparsify` compresses
what stays. Nothing is trained after that: the picture shows what pruning costs in loss and saves in
bytes. A letter at a time, y = W x takes the time in which W passes through memory, so fewer bytes
are less time. The text is made here, of words that follow each other by a table.

**Your own data.** Call `sparsify(model, match=..., density=...)` on your trained model, such as one
of transformers: `match` is a regular expression over the names of its layers. A weight that is
pruned already, by a better rule than magnitude, goes without `density`. It is for 1 to 16 vectors
at a time, as in generating tokens; the weights are constants afterwards, so train before.
"""

import copy
from collections.abc import Callable

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error
from torch import nn

from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import magnitude

LETTERS, CONTEXT, WORDS, FOLLOWERS, WIDTH = 27, 16, 60, 4, 32  # the last letter is the space
DENSITY, DENSITIES = 0.3, (1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05)
LINEAR = r"^[246]$"  # all but the last, which is small


def text(words: int) -> torch.Tensor:
    """Letters of so many words, of which each is followed by one of a few."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 7, (WORDS,), generator=random).tolist()
    spelt = [torch.randint(LETTERS - 1, (n,), generator=random).tolist() for n in lengths]
    table = torch.randint(WORDS, (WORDS, FOLLOWERS), generator=random).tolist()
    word, letters = 0, []
    for choice in torch.randint(FOLLOWERS, (words,), generator=random).tolist():
        word = table[word][choice]
        letters += [*spelt[word], LETTERS - 1]
    return torch.tensor(letters)


def model_of(hidden: int) -> nn.Sequential:
    """The letters in front of a place, (rows, CONTEXT), to logits of the next one."""
    layers = [nn.Embedding(LETTERS, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, hidden)]
    for _ in range(2):
        layers += [nn.ReLU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, LETTERS))


def train(model: nn.Module, windows: torch.Tensor, args) -> None:
    device = args.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.8 / args.hidden)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for _ in range(args.steps):
        rows = windows[torch.randint(len(windows), (args.batch,), device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def writer(model: nn.Module, start: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
    """What writes the likeliest ``count`` letters one by one; on a GPU a CUDA graph."""

    @torch.no_grad()
    def write() -> torch.Tensor:
        letters = start
        for _ in range(count):
            following = model(letters[:, -CONTEXT:]).argmax(-1, keepdim=True)
            letters = torch.cat((letters, following), 1)
        return letters

    result = write()  # loads the kernels, which a capture cannot
    if start.device.type == "cpu":
        return write
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = write()
    return lambda: (graph.replay(), result)[1]


def main() -> None:
    sizes = {"hidden": (256, 8192), "batch": (256, 4096), "steps": (700, 400), "letters": (20, 64)}
    args = parse(__doc__, sizes)
    windows = text(20000).unfold(0, CONTEXT + 1, 1).to(args.device)
    windows, other = windows[:-4000], windows[-4000:]
    model = model_of(args.hidden).to(args.device)
    train(model, windows, args)
    model.requires_grad_(False)
    if args.device.type == "cuda":
        model.half()

    def loss_of(model: nn.Module) -> float:
        return nn.functional.cross_entropy(model(other[:, :-1]).float(), other[:, -1]).item()

    results = {}
    for density in DENSITIES:
        pruned = copy.deepcopy(model)
        layers: dict[str, SparseLinear] = sparsify(pruned, match=LINEAR, density=density)
        loss, megabytes = loss_of(pruned), sum(layer.nbytes for layer in layers.values()) / 1e6
        print(f"density {density:4.2f}   loss {loss:.3f}   {megabytes:.2f} MB")
        results[density] = loss, megabytes
        if density == DENSITY:
            sparse, names = pruned, list(layers)
            for layer in layers.values():
                layer.freeze()  # nobody writes the weights from here on: products begin earlier
    plain = copy.deepcopy(model)
    weights = [plain.get_submodule(name).weight for name in names]
    for weight in weights:
        magnitude(weight, DENSITY, inplace=True)
    start = other[:1, :CONTEXT]
    ways = {f"kernlib, density {DENSITY}": sparse, "torch, dense": plain}
    times = {name: milliseconds(writer(way, start, args.letters), args.device)
             for name, way in ways.items()}  # fmt: skip

    def draw():
        page, (cost, size) = figure(2)
        losses, megabytes = zip(*results.values(), strict=True)
        cost.semilogx(DENSITIES, losses, "o-", color=BLUE, label="pruned")
        cost.axhline(loss_of(model), color=ORANGE, ls="--", label="dense")
        cost.set(title="loss on other text", xlabel="density", ylabel="nats a letter")
        size.semilogx(DENSITIES, megabytes, "o-", color=BLUE, label="compressed")
        size.axhline(sum(w.nbytes for w in weights) / 1e6, color=ORANGE, ls="--", label="dense")
        size.set(title="size of these weights", xlabel="density", ylabel="MB", ylim=(0, None))
        for axis in (cost, size):
            axis.axvline(DENSITY, color=GREY, lw=0.8, ls=":")
            axis.set_xticks((0.05, 0.1, 0.2, 0.5, 1), ("0.05", "0.1", "0.2", "0.5", "1"))
            axis.legend(frameon=False)
        return page

    error = relative_error(sparse(other[:8, :-1]), plain(other[:8, :-1]))
    finish(args, times, error, 1e-2 if args.device.type == "cuda" else 1e-5, draw)


if __name__ == "__main__":
    main()
