"""What a type checker sees of kernlib.compat.fastkron: the names that its ``__getattr__`` loads."""

from kernlib.compat.fastkron import fastkronnumpy as fastkronnumpy
from kernlib.compat.fastkron import fastkrontorch as fastkrontorch
