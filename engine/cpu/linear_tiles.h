// The configuration of AMX tiles that packed products share.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace baton {

// The rows of a left side for which this thread's tiles are configured, or 0.
extern thread_local int tile_rows;

// Tiles 0-3: sums [2 row halves][2 groups]; 4, 5: rows of the left side; 6, 7: lines of the pack. Configuring costs as much
// as a sixth of a product of 32 x 32 x 1024, so it is done when the number of rows changes. release_tiles() ends it.
static inline void configure_tiles(int left_rows) {
  if (left_rows == tile_rows) return;
  struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int upper = left_rows < 16 ? left_rows : 16, lower = left_rows - upper;
  const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = rows[t] ? 64 : 0;
    config.rows[t] = static_cast<uint8_t>(rows[t]);
  }
  asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic names only the first 8 bytes as its input
  _tile_loadconfig(&config);
  tile_rows = left_rows;
}

}  // namespace baton
