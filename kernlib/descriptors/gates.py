"""Gated linear units: one product times the activation of another, as an epilogue.

A module of its own, as its dataclass would cost every first call 0.5 ms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernlib.descriptors.base import shown
from kernlib.descriptors.epilogues import Epilogue, Gelu, Relu, Sigmoid, Silu

ACTIVATIONS = {
    "silu": Silu().expression,
    "gelu": Gelu().expression,
    "gelu_tanh": Gelu("tanh").expression,
    "relu": Relu().expression,
    "sigmoid": Sigmoid().expression,
    "identity": "v",
}


@dataclass(frozen=True, slots=True)
class Gate(Epilogue):
    """``v * activation(gate)``: ``gate`` a tensor of the inputs' dtype that broadcasts to the
    result, of any strides, which may be ``out`` itself.

    ``activation`` is ``"silu"`` (SwiGLU), ``"gelu"`` or ``"gelu_tanh"`` (GeGLU), ``"relu"``
    (ReGLU), ``"sigmoid"`` (GLU) or ``"identity"``: Shazeer, "GLU Variants Improve Transformer"
    (2020). With the product by one weight as ``gate``, that by the other is finished in its own
    kernel. For :class:`kernlib.KroneckerProduct` and :class:`kernlib.BlockSparseMatmul`, whose
    kernels read ``gate`` where they write the result. Raises ValueError for another activation.

    Example:
        >>> product, gate = kl.KroneckerProduct((2,), epilogue=kl.Gate("relu")), torch.ones(1, 2)
        >>> kl.run_kernel(product, torch.tensor([[5.0, 7.0]]), torch.eye(2), gate=2 * gate)
        tensor([[10., 14.]])
    """

    activation: str = "silu"

    def __post_init__(self):
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation must be one of {names}, got {shown(self.activation)}")

    @property
    def expression(self) -> str:
        of_gate = re.sub(r"\bv\b", "gate", ACTIVATIONS[self.activation])
        return f"v * ({of_gate})"

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("gate",)

    @property
    def summands(self) -> tuple[tuple[str, None], ...]:
        return (("gate", None),)
