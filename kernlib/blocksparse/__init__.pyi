"""What a type checker sees of kernlib.blocksparse: the names that its ``__getattr__`` loads."""

from kernlib.families.blocksparse.attention.as_torch import (
    scaled_dot_product_attention as scaled_dot_product_attention,
)
from kernlib.families.blocksparse.attention.functions import attention as attention
from kernlib.families.blocksparse.builders import block_diagonal as block_diagonal
from kernlib.families.blocksparse.builders import causal as causal
from kernlib.families.blocksparse.builders import dense as dense
from kernlib.families.blocksparse.builders import fixed as fixed
from kernlib.families.blocksparse.builders import random as random
from kernlib.families.blocksparse.builders import sliding_window as sliding_window
from kernlib.families.blocksparse.builders import top_k as top_k
from kernlib.families.blocksparse.functions import dds as dds
from kernlib.families.blocksparse.functions import dsd as dsd
from kernlib.families.blocksparse.functions import sdd as sdd
from kernlib.families.blocksparse.layout import Layout as Layout
from kernlib.families.blocksparse.scaled.functions import quantize as quantize
from kernlib.families.blocksparse.scaled.functions import scaled_dds as scaled_dds
from kernlib.families.blocksparse.scaled.functions import scaled_dsd as scaled_dsd
from kernlib.families.blocksparse.softmax.functions import softmax as softmax
