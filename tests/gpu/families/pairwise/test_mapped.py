"""torch.vmap of pairwise calls and of reductions on a GPU: one call, equal to those one by one."""

import pytest
import torch

import kernlib as kl
from tests.gpu.families.pairwise.cases import relative_error

SIZE, M, N, K = 5, 130, 70, 33
GAUSSIAN = kl.gaussian()
CALLS = {
    "cdist": lambda a, b, v, w: kl.cdist(a, b, p=1.0),
    "kernel": lambda a, b, v, w: kl.run_kernel(GAUSSIAN, a, b, bandwidth=w),
    "product": lambda a, b, v, w: kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=w),
    "nearest": lambda a, b, v, w: kl.kernel_topk(kl.l1_distance(), a, b, 3)[0],
}


@pytest.mark.parametrize("case", CALLS)
def test_mapped_calls_are_those_one_by_one(case, seed):
    run = CALLS[case]
    shapes = (SIZE, M, K), (SIZE, N, K), (SIZE, N)
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    tensors.append(torch.rand(SIZE, device="cuda") + 4)
    found = torch.vmap(run)(*tensors)
    wide = [run(*(t.double() for t in one)) for one in zip(*tensors, strict=True)]
    assert relative_error(found, torch.stack(wide)) < 1e-5
    fixed = torch.vmap(run, (0, None, None, None))(tensors[0], *(t[0] for t in tensors[1:]))
    assert relative_error(fixed[0], wide[0]) < 1e-5
