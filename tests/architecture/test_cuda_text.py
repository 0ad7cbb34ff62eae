"""The reader of CUDA text that other tests rely on."""

import ctypes

import pytest

from kernlib.jit import sources
from tests.support import cuda_text

EXPRESSIONS = {
    "a / b": 3,
    "a / b % 2 ? a : b": 7,
    "a > b && !(b != 2) ? 1 : 2": 1,
    "a < b ? 1 : a == 7 ? b * (a - 1) : 3": 12,
    "min(a < b ? a : b, a - 1) + 1": 3,
    "(a + b - 1) / b * sizeof(T)": 8,
    "i64(a) * b ^ 1": 15,
    "x[a / 2] || false": 40,
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions(text):
    names = {"a": 7, "b": 2, "T": 2, "x": [10, 20, 30, 40], "sizeof": int, "i64": int, "false": 0}
    assert eval(cuda_text.expression(text), {"min": min, **names}) == EXPRESSIONS[text]


SOURCE = """
#define LARGE 0
#define SMALL 1
#define COUNT 3
using T = half_t;
constexpr int A = 3, B = A * sizeof(T);  // not C = 4
constexpr bool LAST = B == 6;
#if LARGE
constexpr int C = 1;
#else
#if !SMALL
constexpr int C = 2;
#else
constexpr int C = LAST ? 5
                       : 6;
#endif
#endif
#if COUNT == 1
constexpr int D = 1;
#else
constexpr int D = 2;
#endif
#if COUNT == 3
constexpr int E = 3;
#else
constexpr int E = 4;
#endif
struct Maps { TensorMap x; };
struct Data {
    const unsigned char* packed;  // in order
    int one, two;
    union {
        int three;  // in place of
        i64 four;
    };
    int five;
};
struct Parameters : Maps, VectorPointers<A>, Scalars<1>, Data {};
struct Place {
    Place(const Parameters& p, u32 index) {
        int half = index / 2, rest = index % 2;
        if (LAST) {
            row = half;
            index /= 5;
        } else {
            row = 0;
        }
        column = lane = max(p.one, rest ? row : 0);
        if (rest) column = B;
    }
};
"""


def test_constants_and_what_is_left_out():
    found = cuda_text.Text(SOURCE)
    assert [found[name] for name in ("A", "B", "LAST", "C")] == [3, 6, True, 5]
    assert [found[name] for name in ("D", "E")] == [2, 3]


def test_a_condition_that_is_not_understood_is_no_condition_that_holds():
    for condition in ("A > 1", "A == B", "A && B", "!A == 1"):
        with pytest.raises(ValueError, match="#if"):
            cuda_text.Text(f"#define A 1\n#define B 1\n#if {condition}\n#endif")


def test_structs_are_laid_out_as_by_a_compiler():
    made = cuda_text.Text(SOURCE).parameters()
    names = ("vector0", "vector2", "value0", "device0", "packed", "one", "two")
    assert [getattr(made, name).offset for name in names] == [128, 144, 152, 160, 168, 176, 180]
    assert [getattr(made, name).offset for name in ("three", "four", "five")] == [184, 184, 192]
    assert ctypes.sizeof(made) == 256
    read = made.from_buffer_copy(bytes(184) + (7 << 32 | 5).to_bytes(8, "little") + bytes(64))
    assert (read.three, read.four, read.five) == (5, 7 << 32 | 5, 0)


def test_straight_code_runs():
    found = cuda_text.Text(SOURCE)
    place = found.run(found.body("Place(const"), p=cuda_text.SimpleNamespace(one=1), index=9)
    assert (place.row, place.index, place.column, place.lane) == (4, 1, 6, 4)


def test_files_are_included_once():
    source = '#include "common/types.cuh"\n#include "common/types.cuh"\nusing InputT = float;'
    text = cuda_text.Text(source).text
    assert text.count("struct Scalar {") == 1
    assert "//" not in text and len(text) < len((sources.root() / "common/types.cuh").read_text())
