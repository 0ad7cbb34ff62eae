"""What a type checker sees of kernlib.sparse: the names that its ``__getattr__`` loads."""
