"""CPU tensors: kernlib's calls beside plain torch."""
