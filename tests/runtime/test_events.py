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


def test_calls_of_nothing_are_heard_of_too():
    """Reductions compute by torch where there are no pairs, and say on what."""
    a, b, v, heard = torch.randn(0, 5), torch.randn(7, 5), torch.randn(7, 2), []
    end = events.subscribe(lambda event: heard.append(event.description))
    try:
        kl.kernel_sum(kl.gaussian(), a, b, bandwidth=1.0)
        kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=1.0)
        kl.kernel_min(kl.l1_distance(), a, b)
        kl.kernel_topk(kl.l1_distance(), a, b, 3)
    finally:
        end()
    assert heard and all("on cpu: no kernel" in text for text in heard)
