"""``kernlib doctor --distributed``: the processes that torchrun has started, checked together."""
