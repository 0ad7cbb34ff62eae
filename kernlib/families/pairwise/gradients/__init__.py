"""By points and hyperparameters: ``primitive``, ``formula``, ``weights``, then ``backward``."""
