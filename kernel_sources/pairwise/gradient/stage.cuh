// The raw operands of a stage on their way from device memory to shared memory, for the kernel of
// gradient/tensor.cuh.
#pragma once

#include "common/async_copy.cuh"
#include "pairwise/gradient/tile.cuh"

constexpr int LINE = POINTS + 4;            // of raw weights and coefficients
constexpr int Z_STAGE = FEATURES * POINTS;  // floats: [step][feature][16 points]
constexpr int W_STAGE = QUERIES * LINE, C_STAGE = COLUMNS * LINE;
constexpr int RAW = Z_STAGE + W_STAGE + C_STAGE;

// ROWS lines of 4-byte elements on their way to shared memory, a thread a few elements of a stage.
// Whichever of lines and points are neighbours in device memory, threads side by side read them.
template <int ROWS>
struct Elements {
    static constexpr int PER_THREAD = (ROWS * POINTS + THREADS - 1) / THREADS;
    const float* cursor;
    i64 stride, hop;                       // to the next stage, to the thread's next element
    int place, place_hop, t, t_hop, rows, row_hop;  // rows: that exist from the element's own on

    __device__ __forceinline__ Elements(const float* data, i64 line_stride, i64 point_stride,
                                        i64 exist) {
        bool along = point_stride == 1;
        int row = along ? threadIdx.x / POINTS : threadIdx.x % ROWS;
        t = along ? threadIdx.x % POINTS : threadIdx.x / ROWS;
        row_hop = along ? THREADS / POINTS : 0;
        t_hop = along ? 0 : THREADS / ROWS;
        rows = int(min(exist, i64(ROWS))) - row;
        cursor = data + row * line_stride + t * point_stride;
        stride = point_stride * POINTS;
        hop = row_hop * line_stride + t_hop * point_stride;
        place = row * LINE + t;
        place_hop = row_hop * LINE + t_hop;
    }

    __device__ __forceinline__ void begin(float* to, int left) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (ROWS * POINTS % THREADS && threadIdx.x + i * THREADS >= ROWS * POINTS) break;
            bool exists = t + i * t_hop < left && i * row_hop < rows;
            copy_async<4>(to + place + i * place_hop, cursor + i * hop, exists ? 4 : 0);
        }
        cursor += stride;
    }
};

// Coordinates of z on their way: each thread a few runs of 4 points.
struct Runs {
    static constexpr int QUADS = POINTS / 4, ACROSS = THREADS / QUADS;  // features side by side
    static constexpr int PER_THREAD = (FEATURES + ACROSS - 1) / ACROSS;
    const float* cursor;
    i64 hop;
    int place, t, features;

    __device__ __forceinline__ Runs(const float* data, i64 line_stride, i64 exist) {
        int feature = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
        t = quad * 4;
        features = int(min(exist, i64(FEATURES))) - feature;
        cursor = data + feature * line_stride + t;
        hop = ACROSS * line_stride;
        place = (quad / 4 * FEATURES + feature) * 16 + quad % 4 * 4;
    }

    __device__ __forceinline__ void begin(float* to, int left) {
        int bytes = max(0, min(4, left - t)) * 4;
        const float* from = cursor;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (FEATURES % ACROSS && threadIdx.x / QUADS + i * ACROSS >= FEATURES) break;
            copy_async<16>(to + place + i * ACROSS * 16, from, i * ACROSS < features ? bytes : 0);
            from += hop;
        }
        cursor += POINTS;
    }
};

// Moves the raw operands of a stage. What does not exist becomes zeros: points of no weight, and
// lines of which nothing is stored.
struct Loader {
    Runs z;
    Elements<QUERIES> weights;
    Elements<COLUMNS> coefficients;
    bool weighted;

    __device__ __forceinline__ Loader(const Parameters& parameters, const Share& share, i64 q0,
                                      i64 k0, i64 t0)
        : z(parameters.z + share.l * parameters.z_view.batch_stride +
                k0 * parameters.z_view.column_stride + t0,
            parameters.z_view.column_stride, parameters.features - k0),
          weights(parameters.weights + share.l * parameters.weights_view.batch_stride +
                      q0 * parameters.weights_view.row_stride +
                      t0 * parameters.weights_view.column_stride,
                  parameters.weights_view.row_stride, parameters.weights_view.column_stride,
                  parameters.queries - q0),
          coefficients(parameters.coefficients +
                           share.l * parameters.coefficients_view.batch_stride +
                           share.tile_o * COLUMNS * parameters.coefficients_view.row_stride +
                           t0 * parameters.coefficients_view.column_stride,
                       parameters.coefficients_view.row_stride,
                       parameters.coefficients_view.column_stride,
                       parameters.coefficient_count - share.tile_o * COLUMNS),
          weighted(!SINGLE || parameters.coefficient_count > 0) {}

    // The next stage, of whose points `left` exist.
    __device__ __forceinline__ void begin(float* raw, int left) {
        z.begin(raw, left);
        weights.begin(raw + Z_STAGE, left);
        if (weighted) coefficients.begin(raw + Z_STAGE + W_STAGE, left);
    }
};
