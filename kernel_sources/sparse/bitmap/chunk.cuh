// Sizes of a chunk of a bitmap matrix. Layout: kernlib/families/sparse/formats/bitmap.py.
#pragma once

constexpr int CHUNK_ROWS = 16, CHUNK_COLUMNS = 256;
constexpr int POSITIONS = CHUNK_ROWS * CHUNK_COLUMNS;
constexpr int WORDS = 128, BITMAP_BYTES = 4 * WORDS;  // of the bitmap
