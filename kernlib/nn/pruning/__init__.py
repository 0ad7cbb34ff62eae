"""Pruning of models: ``targets`` has the layers and how many of their weights stay, ``calibration``
runs a model over batches block by block, and ``methods`` is what users call."""
