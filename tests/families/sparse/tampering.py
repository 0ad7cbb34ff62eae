"""States of compressed matrices with random bytes in random places, and everything that reads
them: what raises says why, and what does not raise is as good as any matrix."""

from __future__ import annotations

import io
import json
import pickle

import torch
from hypothesis import strategies as st

from kernlib import sparse
from kernlib.nn import SparseLinear
from kernlib.sparse import SparseMatrix, compress
from tests.families.sparse import cases

FORMATS = (*cases.FORMATS, *cases.QUANTISED)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = ((1, 1), (5, 40), (37, 300), (70, 513), (33, 2100))
EDGES = (0, 1, -1, 2**31 - 1, -(2**31), 65535, 255, 8, 16)  # numbers that places are made of


@st.composite
def states(draw):
    """Shape, dtype, density, format and a seed, and changes: a tensor's number, a place in it, and
    either a number to put there as a whole element or bytes."""
    changes = st.tuples(
        st.integers(0, 2),
        st.floats(0, 1, exclude_max=True),
        st.one_of(st.sampled_from(EDGES), st.integers(-40, 40), st.binary(min_size=1, max_size=9)),
        st.booleans(),
    )
    return (
        draw(st.sampled_from(SHAPES)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from((0.0, 0.05, 0.4, 0.9))),
        draw(st.sampled_from(FORMATS)),
        draw(st.integers(0, 2**16)),
        draw(st.lists(changes, min_size=1, max_size=4)),
    )


def tampered(case, device="cpu") -> tuple[dict, dict[str, torch.Tensor]]:
    """The header and tensors of a case, changed."""
    shape, dtype, density, format, seed, changes = case
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    kept = torch.rand(shape, generator=generator) < density
    header, tensors = compress(torch.where(kept, values, 0).to(dtype), format).state()
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for number, part, put, added in changes:
        tensor = list(found.values())[number % len(found)]
        if tensor.numel():
            write(tensor.view(-1), int(part * tensor.numel()), put, added)
    return header, {name: tensor.to(device) for name, tensor in found.items()}


def write(flat: torch.Tensor, place: int, put: int | bytes, added: bool) -> None:
    """Put a number, or add it, or put bytes, at a place of a tensor."""
    if isinstance(put, bytes):
        whole = flat.view(torch.uint8)
        at = place * flat.element_size()
        given = torch.frombuffer(bytearray(put), dtype=torch.uint8)[: len(whole) - at]
        whole[at : at + len(given)] = given
    elif flat.dtype.is_floating_point:
        flat[place] = float(put)
    else:
        bits = 8 * flat.element_size()
        number = (int(flat[place]) + put if added else put) % 2**bits
        if flat.dtype != torch.uint8 and number >= 2 ** (bits - 1):
            number -= 2**bits
        flat[place] = number


def refusals(header: dict, tensors: dict[str, torch.Tensor]) -> list:
    """What each loader answers: a matrix or a layer, or the error that it raised."""
    found = []
    for load in (from_state, from_pickle, from_layer):
        try:
            found.append(load(header, tensors))
        except (TypeError, ValueError) as error:
            found.append(error)
    return found


def from_state(header, tensors) -> SparseMatrix:
    return SparseMatrix.from_state(header, tensors)


def from_pickle(header, tensors) -> SparseMatrix:
    """By torch.save of a matrix that holds these tensors, as a file that was changed would."""

    class Changed:
        def __reduce__(self):
            return SparseMatrix.from_state, (header, tensors)

    file = io.BytesIO(pickle.dumps(Changed()))
    return pickle.load(file)


def from_layer(header, tensors) -> SparseMatrix:
    """By a layer's state_dict, as version 0.1 saved it."""
    rows, cols = header["shape"]
    dtype = getattr(torch, header["dtype"])
    layer = SparseLinear(cols, rows, False, dtype=dtype, device=next(iter(tensors.values())).device)
    text = json.dumps(header, sort_keys=True).encode()
    state = {"_extra_state": torch.tensor(list(text), dtype=torch.uint8)}
    state |= {f"weight_{name}": tensor for name, tensor in tensors.items()}
    try:
        layer.load_state_dict(state)
    except RuntimeError as error:  # which is torch's, of all that is wrong with a state_dict
        raise ValueError(str(error)) from error
    return layer.matrix


def consume(w: SparseMatrix) -> None:
    """Everything that reads a matrix."""
    dense = w.to_dense()
    assert dense.shape == w.shape and dense.dtype == w.dtype and dense.device == w.device
    for format in ("bitmap", "macko", "u8"):
        assert w.convert(format).shape == w.shape
    assert w.transpose().shape == w.shape[::-1]
    for columns in (1, 3, 20):
        y = sparse.matmul(w, torch.ones(columns, w.shape[1], dtype=w.dtype, device=w.device))
        assert y.shape == (columns, w.shape[0])
