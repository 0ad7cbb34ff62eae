"""Who listens to events, and until when."""

import torch

import kernlib as kl
from kernlib import events


def test_each_subscription_ends_once_and_alone():
    heard = []
    first, second = events.subscribe(heard.append), events.subscribe(heard.append)
    try:
        first()
        first()
        events.emit("lookup", "", "", "")
        assert len(heard) == 1
    finally:
        second()
    events.emit("lookup", "", "", "")
    assert len(heard) == 1 and heard.append not in events.watched


def test_every_call_that_torch_computes_is_heard_of():
    """Those without a pair and gradients of matrices too, whatever describes them."""
    a, b, none, heard = torch.randn(9, 5), torch.randn(7, 5), torch.randn(0, 5), []
    v, c = torch.randn(7, 2), torch.randn(2, 7)
    calls = (
        lambda: kl.cdist(a, b),
        lambda: kl.cdist_grad(torch.randn(7, 4), torch.randn(5, 7), c, torch.randn(5, 4), p=1.5),
        lambda: kl.agop(kl.laplace_l1(), a, b, c, bandwidth=1.0),
        lambda: kl.kernel_sum(kl.gaussian(), none, b, bandwidth=1.0),
        lambda: kl.kernel_matmul(kl.gaussian(), none, b, v, bandwidth=1.0),
        lambda: kl.kernel_min(kl.l1_distance(), none, b),
        lambda: kl.kernel_topk(kl.l1_distance(), none, b, 3),
        lambda: kl.run_kernel(kl.KroneckerSparse(1, 4, 5, 1), a, torch.randn(1, 4, 5, 1)),
        lambda: kl.kron_matmul(torch.randn(3, 4), [torch.randn(2, 3), torch.randn(2, 5)]),
    )
    end = events.subscribe(lambda event: heard.append(event.description))
    try:
        for call in calls:
            heard.clear()
            call()
            assert heard and all("on cpu: no kernel" in text for text in heard)
    finally:
        end()
