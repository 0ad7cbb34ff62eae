"""The service behind all families: first calls and compiles in ``run``, its cache under load in
``soak``, whose processes are in ``soak_workers`` and whose damages in ``soak_damages``."""
