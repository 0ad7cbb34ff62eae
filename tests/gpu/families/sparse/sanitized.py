"""Small odd calls of every format's codec and product, to be run under compute-sanitizer.

With "racecheck" as an argument those whose threads hand each other data by mbarriers that this tool
does not follow are left out: the sums of the bitmap kernel's warps."""

from __future__ import annotations

import sys

import torch

import kernlib as kl
from kernlib import sparse
from tests.families.sparse.cases import FORMATS, QUANTISED

SHAPES = ((1, 1), (17, 300), (33, 2050), (100, 5000))


def main() -> None:
    torch.manual_seed(0)
    racecheck = "racecheck" in sys.argv
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for rows, cols in SHAPES:
            w = torch.randn(rows, cols, device="cuda").to(dtype)
            w[torch.rand(rows, cols, device="cuda") < 0.6] = 0
            w[rows // 2] = 0
            for name in (*FORMATS, *QUANTISED):
                made = sparse.compress(w, name)
                assert name in QUANTISED or torch.equal(made.to_dense(), w)
                if racecheck and name.startswith("bitmap"):
                    continue
                for columns in (1, 3, 8, 16, *((40, 100, 200) if name == "bitmap" else ())):
                    x = torch.randn(columns, cols, device="cuda").to(dtype)
                    bias = torch.randn(rows, device="cuda").to(dtype)
                    sparse.matmul(made, x, bias=bias, epilogue=(kl.Gelu(),))
                out = torch.empty(rows, 2, device="cuda", dtype=dtype).T
                sparse.matmul(made, x[:2], out=out)
    undo_any_bytes()
    torch.cuda.synchronize()
    print("done")


def undo_any_bytes() -> None:
    """Tensors of random bytes, unchecked: what undoes codes must not leave them."""
    for dtype in (torch.float16, torch.float32):
        for rows, cols in SHAPES:
            for name in (*FORMATS, *QUANTISED):
                held = sparse.compress(torch.ones(rows, cols, dtype=dtype, device="cuda"), name)
                for one in held.tensors:
                    tensors = {**held.tensors, one: any_bytes(held.tensors[one])}
                    made = sparse.SparseMatrix(name, (rows, cols), dtype, tensors, held.facts)
                    assert made.to_dense().shape == (rows, cols)


def any_bytes(like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    made = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    return made.view(like.dtype).view(like.shape)


if __name__ == "__main__":
    main()
