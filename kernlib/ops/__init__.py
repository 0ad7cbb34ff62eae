"""Where pickles of kernlib 0.1 look for what is in ``kernlib.families``."""
