// How pack.cuh leaves an operand for hopper_words.cuh: pairs of float16 words in the order of
// shared memory, so that plain copies of whole pieces bring them.
//
// A number x is s * (hi + lo / 2^11), both float16: hi the nearest to x / s, lo what is left of it.
// s is a power of two for a row of 64 numbers along the depth, the largest of which is between 2^14
// and 2^15 then: x loses 2^-23 of itself down to 2^-27 of the row's largest, and below that 2^-50
// of the largest. So what another row or another 64 of the depth holds costs no bit.
// An infinity or a NaN has hi 1 with its sign and is itself lo: of the products hi * hi, hi * lo
// and lo * hi the last two make what torch has, an infinity of its sign or, by 0, NaN. A hi that is
// an infinity would make NaN with each lo of 0, as those of small integers are.
#pragma once

#include "blocksparse/hopper/pieces.cuh"

constexpr int SQUARE = 64;                      // rows that one CTA packs
constexpr int SQUARE_BYTES = SQUARE * ROW_BYTES;
constexpr int PIECE_WORDS = 2 * SQUARE_BYTES;   // 64 lines of a block: hi, then lo
constexpr int TILE_COLUMNS = 128;
constexpr int PANEL_WORDS = 2 * TILE_COLUMNS * ROW_BYTES;  // 128 columns: hi, then lo
constexpr float LOW_FACTOR = 1 << 11, CROSS_FACTOR = 1.0f / (1 << 11);

// Sums of products are at most 2^36, scales 2^113 on either side. Those of lines are stored times
// 2^-21, those of columns times 2^14: so a sum times the one, and then times the other, overflows
// where 2^-7 of the result does, which hopper_words.cuh multiplies by 2^7 at the end. Lines whose
// largest number is below 2^-118, and results below 2^-119, lose bits as denormals do.
constexpr float LINE_FACTOR = 1.0f / (1 << 21), COLUMN_FACTOR = 1 << 14, RESULT_FACTOR = 1 << 7;
