// The configuration of AMX tiles that packed products share.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace baton {

// Tiles 0-3: sums [2 row halves][2 groups]; 4, 5: rows of the left side; 6, 7: lines of the pack.
// Products configure them in each call, because other code on this thread (oneDNN) configures them too.
static inline void configure_tiles(int upper, int lower) {
  struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = rows[t] ? 64 : 0;
    config.rows[t] = static_cast<uint8_t>(rows[t]);
  }
  _tile_loadconfig(&config);
}

}  // namespace baton
