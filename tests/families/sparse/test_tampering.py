"""States with any bytes at all on the CPU: a loader raises ValueError that names the tensor, or
what it loads is a matrix to every function."""

import torch
from hypothesis import given, settings

from kernlib.compat import macko
from kernlib.families.sparse.layout import format_of
from tests.families.sparse.tampering import consume, refusals, states, tampered


@settings(max_examples=150)
@given(states())
def test_a_state_with_any_bytes_is_refused_or_a_matrix(case):
    header, tensors = tampered(case)
    names = (*format_of(case[3]).TENSORS, "the fact")
    found = refusals(header, tensors)
    for one in found:
        assert isinstance(one, Exception) is isinstance(found[0], Exception)
        if isinstance(one, Exception):
            assert any(name in str(one) for name in names), one
        else:
            consume(one)


@settings(max_examples=60)
@given(states())
def test_a_tuple_with_any_bytes_is_refused_or_a_matrix(case):
    header, tensors = tampered((case[0], torch.float16, case[2], "macko", *case[4:]))
    compressed = *(tensors[name] for name in ("values", "deltas", "row_ptr")), *header["shape"]
    x, dense = torch.ones(1, header["shape"][1], dtype=torch.float16), None
    for call in (
        macko.decompress,
        lambda c: macko.multiply(c, x),
        lambda c: macko.move_to_device(c, "cpu"),
    ):
        try:
            dense = call(compressed)
        except ValueError as error:
            assert "row_ptr must rise" in str(error) or "deltas must lead" in str(error)
        else:
            assert dense is not None
