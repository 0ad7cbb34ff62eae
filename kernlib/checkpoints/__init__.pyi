"""What a type checker sees of kernlib.checkpoints: the names that its ``__getattr__`` loads."""

from kernlib.checkpoints.conversion import convert as convert
from kernlib.checkpoints.conversion import plan as plan
from kernlib.checkpoints.conversion import to_dense as to_dense
from kernlib.checkpoints.estimate import Layer as Layer
from kernlib.checkpoints.files import Checkpoint as Checkpoint
from kernlib.checkpoints.files import CheckpointError as CheckpointError
