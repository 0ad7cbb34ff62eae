"""Scores as CUDA text, and the same of tensors in float64."""

from __future__ import annotations

import torch

from tests.families.blocksparse.lowering.attention.cases import Case

LEAST = torch.finfo(torch.float32).min

ALIBI = """struct Score {
    float slope_of_head;
    __device__ __forceinline__ Score(const Captured* captured, int batch, int head)
        : slope_of_head(*captured[0].from<float>(batch, head)) {}
    __device__ __forceinline__ float operator()(float v, int row, int col) const {
        return v + slope_of_head * float(col - row);
    }
    __device__ __forceinline__ float slope(float, int, int) const { return 1.0f; }
    __device__ __forceinline__ bool keeps(int, int) const { return true; }
};"""

BIASED = """struct Score {
    const float* bias;
    i64 by_row, by_col;
    __device__ __forceinline__ Score(const Captured* captured, int batch, int head)
        : bias(captured[0].from<float>(batch, head)), by_row(captured[0].row),
          by_col(captured[0].col) {}
    __device__ __forceinline__ float operator()(float v, int row, int col) const {
        return v + bias[row * by_row + col * by_col];
    }
    __device__ __forceinline__ float slope(float, int, int) const { return 1.0f; }
    __device__ __forceinline__ bool keeps(int, int) const { return true; }
    template <int K>
    __device__ __forceinline__ float slope_of(float, int, int) const { return 1.0f; }
};"""

DOCUMENTS = """struct Score {
    const i64 *of_rows, *of_cols;
    i64 row_step, col_step;
    __device__ __forceinline__ Score(const Captured* captured, int batch, int head)
        : of_rows(captured[0].from<i64>(batch, head)),
          of_cols(captured[1].from<i64>(batch, head)),
          row_step(captured[0].row),
          col_step(captured[1].col) {}
    __device__ __forceinline__ float operator()(float v, int, int) const { return v; }
    __device__ __forceinline__ float slope(float, int, int) const { return 1.0f; }
    __device__ __forceinline__ bool keeps(int row, int col) const {
        return of_rows[row * row_step] == of_cols[col * col_step];
    }
};"""

SOFT_BIAS = """struct Score {
    const float *of_rows, *of_cols, *of_pairs;
    i64 row_step, col_step, pair_row, pair_col;
    __device__ __forceinline__ Score(const Captured* captured, int batch, int head)
        : of_rows(captured[0].from<float>(batch, head)),
          of_cols(captured[1].from<float>(batch, head)),
          of_pairs(captured[2].from<float>(batch, head)),
          row_step(captured[0].row),
          col_step(captured[1].col),
          pair_row(captured[2].row),
          pair_col(captured[2].col) {}
    __device__ __forceinline__ float factor(int row) const { return of_rows[row * row_step]; }
    __device__ __forceinline__ float operator()(float v, int row, int col) const {
        return factor(row) * v * v + of_cols[col * col_step] +
               v * of_pairs[row * pair_row + col * pair_col];
    }
    __device__ __forceinline__ float slope(float v, int row, int col) const {
        return 2.0f * factor(row) * v + of_pairs[row * pair_row + col * pair_col];
    }
    __device__ __forceinline__ bool keeps(int row, int col) const { return (row + col) % 7 != 0; }
    template <int K>
    __device__ __forceinline__ float slope_of(float v, int, int) const {
        return K == 0 ? v * v : K == 1 ? 1.0f : v;
    }
};"""


def with_least(case: Case) -> tuple[Case, tuple[torch.Tensor, ...]]:
    """A mask that is added, of the least float where something is left out: in rows of the first
    ten and a hundredth everywhere, so that all weights of these are the same."""
    mask = torch.where(torch.rand(case.batch, 1, case.queries, case.keys) < 0.3, LEAST, 0.0)
    mask[:, :, :10] = mask[:, :, 64:70] = LEAST
    case = case._replace(
        text=BIASED, score=lambda v, row, col, head, batch, bias: v + bias.double()
    )
    return case, (mask.expand(-1, case.heads, -1, -1),)


def soft_bias(case: Case) -> Case:
    """A case with that score and its mask, of three captured tensors."""
    return case._replace(
        text=SOFT_BIAS,
        score=lambda v, row, col, head, batch, a, b, c: a * v * v + b + v * c,
        mask=lambda row, col, head, batch, *_: (row + col) % 7 != 0,
    )
