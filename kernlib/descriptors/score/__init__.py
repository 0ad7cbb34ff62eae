"""The language of scores and masks, which is that of epilogues with positions, whole numbers,
conditions and captured tensors: ``kinds`` of its parts, the ``grammar`` that reads it, the value
that descriptors hold, ``expression``, and the ``bounds`` of a mask that is a window."""
