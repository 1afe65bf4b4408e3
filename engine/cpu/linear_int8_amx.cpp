// Int8 products with AMX. 16 lines of a pack are one tile.
#include "linear.h"

#include <immintrin.h>

#include "linear_tiles.h"

namespace baton {
namespace {

constexpr int kAhead = 4096;  // bytes to prefetch ahead: four tiles

// Adds the integer sums of one block of inputs, [16][16], to `rows` rows of 16 outputs.
void add_block(const int32_t* sums, const int32_t* starts, const float* scales, int rows, bool first, float* c,
               int64_t ldc) {
  for (int r = 0; r < rows; ++r) {
    const __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums + 16 * r), _mm512_set1_epi32(starts[r]));
    const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * ldc);
    _mm512_storeu_ps(c + r * ldc, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scales[r]), before));
  }
}

// Few rows wait for the weights.
inline void prefetch(const uint8_t* tile) {
  for (int line = 0; line < 16; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(tile) + kAhead + 64 * line, _MM_HINT_T0);
}

template <bool Lower, bool Second>
void tiles(const Int8Block& a, const uint8_t* pack, int64_t depth, float* c, int64_t ldc) {
  alignas(64) int32_t sums[4][16 * 16];
  const uint8_t* second = pack + depth * kGroup;
  const int8_t* values = a.values;
  const float* scales = a.scales;
  const int32_t* starts = a.starts;
  const int upper = Lower ? 16 : a.rows, lower = a.rows - upper;
  for (int64_t k = 0; k < depth; scales += a.rows, starts += a.rows) {
    const bool first = k == 0;
    _tile_zero(0);
    if (Second) _tile_zero(1);
    if (Lower) _tile_zero(2);
    if (Lower && Second) _tile_zero(3);
    for (const int64_t end = std::min(depth, k + kScaleInputs); k < end;
         k += kTileInputs, values += a.rows * kTileInputs) {
      if (!Lower) prefetch(pack + k * kGroup);
      if (!Lower && Second) prefetch(second + k * kGroup);
      _tile_loadd(6, pack + k * kGroup, 64);
      _tile_loadd(4, values, 64);
      _tile_dpbsud(0, 4, 6);
      if (Second) {
        _tile_loadd(7, second + k * kGroup, 64);
        _tile_dpbsud(1, 4, 7);
      }
      if (Lower) {
        _tile_loadd(5, values + 16 * kTileInputs, 64);
        _tile_dpbsud(2, 5, 6);
        if (Second) _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    if (Second) _tile_stored(1, sums[1], 64);
    if (Lower) _tile_stored(2, sums[2], 64);
    if (Lower && Second) _tile_stored(3, sums[3], 64);
    add_block(sums[0], starts, scales, upper, first, c, ldc);
    if (Second) add_block(sums[1], starts, scales, upper, first, c + kGroup, ldc);
    if (Lower) add_block(sums[2], starts + 16, scales + 16, lower, first, c + 16 * ldc, ldc);
    if (Lower && Second) add_block(sums[3], starts + 16, scales + 16, lower, first, c + 16 * ldc + kGroup, ldc);
  }
}

}  // namespace

void gemm_int8_amx(const Int8Block& a, const uint8_t* pack, int64_t depth, int groups, float* c, int64_t ldc) {
  configure_tiles(a.rows);
  for (int g = 0; g < groups; g += 2) {
    const uint8_t* lines = pack + g * depth * kGroup;
    float* to = c + g * kGroup;
    const bool second = g + 1 < groups;
    if (a.rows > 16 && second) tiles<true, true>(a, lines, depth, to, ldc);
    else if (a.rows > 16) tiles<true, false>(a, lines, depth, to, ldc);
    else if (second) tiles<false, true>(a, lines, depth, to, ldc);
    else tiles<false, false>(a, lines, depth, to, ldc);
  }
}

}  // namespace baton
