"""What a type checker sees of kernlib.compat: the names that its ``__getattr__`` loads."""

from kernlib.compat import fastkron as fastkron
from kernlib.compat import kermac as kermac
from kernlib.compat import linear_operator as linear_operator
from kernlib.compat import macko as macko
from kernlib.compat import peft as peft
from kernlib.compat import torch_blocksparse as torch_blocksparse
from kernlib.compat import transformers as transformers
