// Packed products with AMX. 16 lines of a pack are one tile.
#include "linear.h"

#include <immintrin.h>

#include "linear_tiles.h"

namespace baton {
namespace {

constexpr int64_t kInputBlock = 256;  // inputs of a panel's rows that are multiplied in turn: their lines of two groups
                                      // (16 KiB) stay in the first-level cache
constexpr int64_t kUnitColumns = kUnit * kGroup;

// Few rows wait for the weights, and loads of tiles alone do not keep enough of them under way.
inline void prefetch_next(const bf16* tile) {
  for (int line = 0; line < 16; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(tile) + kAheadBytes + 64 * line, _MM_HINT_T0);
}

// The left side of a block of up to 32 rows.
struct Rows {
  const bf16 *upper, *lower;             // its first tile of 16 rows, and its second
  int64_t stride;                        // bytes from row to row
  int64_t upper_step, lower_step;        // elements from one input to the next
};

// c[32][32] = sums over k inputs, added to `c` unless they are the `first`. A tile without rows is skipped.
template <bool Lower, bool Second>
void tiles(const Rows& a, const bf16* lines, const bf16* second, int64_t k, bool first, float* c, int64_t ldc,
           Ahead* ahead) {
  const int64_t c_stride = ldc * sizeof(float);
  if (first) {
    _tile_zero(0);
    if (Second) _tile_zero(1);
    if (Lower) _tile_zero(2);
    if (Lower && Second) _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_stride);
    if (Second) _tile_loadd(1, c + kGroup, c_stride);
    if (Lower) _tile_loadd(2, c + 16 * ldc, c_stride);
    if (Lower && Second) _tile_loadd(3, c + 16 * ldc + kGroup, c_stride);
  }
  for (int64_t i = 0; i < k; i += 32) {
    if (!Lower) prefetch_next(lines + i * kGroup);
    if (ahead != nullptr) ahead->step();
    _tile_loadd(6, lines + i * kGroup, 64);
    _tile_loadd(4, a.upper + i * a.upper_step, a.stride);
    _tile_dpbf16ps(0, 4, 6);
    if (Second) {
      _tile_loadd(7, second + i * kGroup, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (Lower) {
      _tile_loadd(5, a.lower + i * a.lower_step, a.stride);
      _tile_dpbf16ps(2, 5, 6);
      if (Second) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  if (Second) _tile_stored(1, c + kGroup, c_stride);
  if (Lower) _tile_stored(2, c + 16 * ldc, c_stride);
  if (Lower && Second) _tile_stored(3, c + 16 * ldc + kGroup, c_stride);
}

// A block of m <= 32 rows. Few rows read the weights as one stream: two at once are slower, because they are prefetched
// in turns.
void block(const Rows& a, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c, int64_t ldc) {
  configure_tiles(m);
  const int step = m > 16 ? 2 : 1;
  for (int g = 0; g < groups; g += step, pack += step * depth * kGroup, c += step * kGroup) {
    const bf16* second = pack + depth * kGroup;
    if (m <= 16) tiles<false, false>(a, pack, nullptr, k, true, c, ldc, nullptr);
    else if (g + 1 < groups) tiles<true, true>(a, pack, second, k, true, c, ldc, nullptr);
    else tiles<true, false>(a, pack, nullptr, k, true, c, ldc, nullptr);
  }
}

// Rows [row, row + m) of a left side in tiles.
Rows tiled_rows(const bf16* a, int64_t row, int m, int64_t k) {
  const bf16* upper = a + row * k;
  return {upper, upper + 16 * k, 64, m < 16 ? m : 16, m - 16};
}

}  // namespace

thread_local int tile_rows = 0;

void release_tiles() {
  if (tile_rows == 0) return;
  _tile_release();
  tile_rows = 0;
}

void gemm_amx(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
              int64_t ldc) {
  block({a, a + 16 * lda, lda * static_cast<int64_t>(sizeof(bf16)), 1, 1}, m, pack, depth, k, groups, c, ldc);
}

void gemm_amx_panel(const bf16* a, int64_t m, const bf16* pack, int64_t k, int groups, float* c, Ahead ahead) {
  const int64_t full = m / kRowBlock * kRowBlock;
  if (full > 0) configure_tiles(kRowBlock);
  for (int64_t i = 0; i < k; i += kInputBlock) {
    const int64_t inputs = std::min(kInputBlock, k - i);
    const bf16 *lines = pack + i * kGroup, *second = lines + k * kGroup;
    for (int64_t row = 0; row < full; row += kRowBlock) {
      Rows rows = tiled_rows(a, row, kRowBlock, k);
      rows.upper += 16 * i, rows.lower += 16 * i;
      const auto multiply = groups > 1 ? tiles<true, true> : tiles<true, false>;
      multiply(rows, lines, second, inputs, i == 0, c + row * kUnitColumns, kUnitColumns, &ahead);
    }
  }
  const int rest = static_cast<int>(m - full);
  if (rest > 0) block(tiled_rows(a, full, rest, k), rest, pack, k, k, groups, c + full * kUnitColumns, kUnitColumns);
}

}  // namespace baton
