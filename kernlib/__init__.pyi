"""What a type checker sees of kernlib: the names that its ``__getattr__`` loads."""

from kernlib import compat as compat
from kernlib import descriptors as descriptors
from kernlib import events as events
from kernlib import linalg as linalg
from kernlib import nn as nn
from kernlib import settings as settings
from kernlib import sparse as sparse
from kernlib.ahead import compile as compile
from kernlib.ahead import prepare as prepare
from kernlib.descriptors.epilogues import Bias as Bias
from kernlib.descriptors.epilogues import Cauchy as Cauchy
from kernlib.descriptors.epilogues import Custom as Custom
from kernlib.descriptors.epilogues import Gaussian as Gaussian
from kernlib.descriptors.epilogues import Gelu as Gelu
from kernlib.descriptors.epilogues import Laplace as Laplace
from kernlib.descriptors.epilogues import LeakyRelu as LeakyRelu
from kernlib.descriptors.epilogues import Matern as Matern
from kernlib.descriptors.epilogues import Polynomial as Polynomial
from kernlib.descriptors.epilogues import PowerExponential as PowerExponential
from kernlib.descriptors.epilogues import RationalQuadratic as RationalQuadratic
from kernlib.descriptors.epilogues import Relu as Relu
from kernlib.descriptors.epilogues import Scale as Scale
from kernlib.descriptors.epilogues import Sigmoid as Sigmoid
from kernlib.descriptors.epilogues import Silu as Silu
from kernlib.descriptors.epilogues import Tanh as Tanh
from kernlib.errors import CaptureError as CaptureError
from kernlib.errors import CompileError as CompileError
from kernlib.errors import ConvergenceWarning as ConvergenceWarning
from kernlib.errors import KernlibError as KernlibError
from kernlib.errors import NotCachedError as NotCachedError
from kernlib.errors import UnsupportedError as UnsupportedError
from kernlib.tuner import tune as tune

__version__: str
