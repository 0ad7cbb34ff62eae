// A warp's sums through shared memory to device memory, PASS_LINES of its lines at a time. They
// wait there as fp32 in the order in which the result is written, so that the epilogue is a short
// loop over 16-byte stores: over a thread's registers it would be up to 128 copies.
#pragma once

#include "blocksparse/multiply.cuh"
#include "blocksparse/summands.cuh"

using AccT = Config::AccT;        // arithmetic, float
using OutputT = Config::OutputT;  // storage of the result
constexpr bool ALONG_LINES = Config::ALONG_LINES;  // lines lie closer together in it than columns
constexpr int SUMMANDS = Config::SUMMANDS;
constexpr int OUT_CHUNK = 16 / sizeof(OutputT);
constexpr int PASS_LINES = WARP_LINES < 32 ? WARP_LINES : 32;
// Steps between lines of the waiting sums, chosen for writes without bank conflicts: of pairs in
// eight lines, or of single sums in eight columns.
constexpr int PITCH = ALONG_LINES ? PASS_LINES + 4 : WARP_COLUMNS + 8;
constexpr int WAITING = (ALONG_LINES ? WARP_COLUMNS : PASS_LINES) * PITCH;  // floats of a warp

// Where a warp's results go, how many of its lines and columns exist, and whether aligned 16-byte
// stores may be used.
struct Target {
    OutputT* out;
    i64 line_stride, column_stride, feature;
    int lines, columns;
    bool whole_stores;
};

__device__ __forceinline__ void put_sums(float* waiting, const Sums& sums, int pass) {
    int lane = threadIdx.x % 32, line = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {
        if (fragment * 16 / PASS_LINES != pass) continue;
        int first = fragment * 16 % PASS_LINES;
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; ++i) {
            int j = i / 2, half = i % 2, r = line + first + half * 8, c = column + j * 8;
            float x = sums[fragment][j][2 * half], y = sums[fragment][j][2 * half + 1];
            if (ALONG_LINES) {
                waiting[c * PITCH + r] = x;
                waiting[(c + 1) * PITCH + r] = y;
            } else {
                store_vector(waiting + r * PITCH + c, Vector<float, 2>{x, y});
            }
        }
    }
}

// RUN results of a line, or of a column, at a time.
template <int RUN>
__device__ __forceinline__ void store_runs(const float* waiting, const Target& target,
                                           const Finish& finish, const Beside<SUMMANDS>& beside,
                                           int pass) {
    constexpr int LENGTH = ALONG_LINES ? PASS_LINES : WARP_COLUMNS;
    constexpr int COUNT = ALONG_LINES ? WARP_COLUMNS : PASS_LINES;
    constexpr int ACROSS = LENGTH / RUN;
    int above = pass * PASS_LINES, lines = target.lines - above;
#pragma unroll 1
    for (int index = threadIdx.x % 32; index < COUNT * ACROSS; index += 32) {
        int first = index % ACROSS * RUN, other = index / ACROSS;
        int line = ALONG_LINES ? first : other, column = ALONG_LINES ? other : first;
        if (line >= lines || column >= target.columns) continue;
        float values[RUN];
        if constexpr (RUN == 1) {
            values[0] = waiting[other * PITCH + first];
        } else {
#pragma unroll
            for (int e = 0; e < RUN; e += 4) {
                auto four = load_vector<float, 4>(waiting + other * PITCH + first + e);
#pragma unroll
                for (int i = 0; i < 4; ++i) values[e + i] = four.element[i];
            }
        }
        Given<SUMMANDS> given[RUN];
        Vector<OutputT, RUN> result;
#pragma unroll
        for (int e = 0; e < RUN; ++e)
            given[e].read(beside, above + line + (ALONG_LINES ? e : 0),
                          column + (ALONG_LINES ? 0 : e));
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
            i64 feature = target.feature + above + line + (ALONG_LINES ? e : 0);
            AccT value = values[e];
            if (Config::EPILOGUE) value = given[e].finished(finish, value, feature);
            result.element[e] = convert<OutputT>(value);
        }
        OutputT* to = target.out + (above + line) * target.line_stride +
                      column * target.column_stride;
        store_vector(to, result);
    }
}

__device__ __forceinline__ void store_warp(float* waiting, const Sums& sums, const Target& target,
                                           const Finish& finish, const Beside<SUMMANDS>& beside) {
#pragma unroll 1
    for (int pass = 0; pass < WARP_LINES / PASS_LINES; ++pass) {
        if (pass * PASS_LINES >= target.lines) break;
        __syncwarp();
        put_sums(waiting, sums, pass);
        __syncwarp();
        if (target.whole_stores) store_runs<OUT_CHUNK>(waiting, target, finish, beside, pass);
        else store_runs<1>(waiting, target, finish, beside, pass);
    }
}
