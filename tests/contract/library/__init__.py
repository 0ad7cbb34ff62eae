"""What every operation promises to torch.compile, torch.export, make_fx, fake tensors and
transforms: one suite over the cases of the families. ``cases`` says what an operation contributes,
in a ``library_cases.py`` in the folder of its family's tests; ``operations`` finds those."""
