"""By points and hyperparameters: ``formula``, ``weights``, ``points``, then ``eager``."""
