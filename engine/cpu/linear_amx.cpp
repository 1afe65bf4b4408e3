// Packed products with AMX. 16 lines of a pack are one tile.
#include "linear.h"

#include <immintrin.h>

#include "linear_tiles.h"

namespace baton {
namespace {

constexpr int kAhead = 4096;  // bytes to prefetch ahead: four tiles

// Few rows wait for the weights, and loads of tiles alone do not keep enough of them under way.
inline void prefetch(const bf16* tile) {
  for (int line = 0; line < 16; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(tile) + kAhead + 64 * line, _MM_HINT_T0);
}

template <bool Tiled, bool Lower, bool Second>
void tiles(const bf16* a, int64_t lda, const bf16* pack, int64_t depth, int64_t k, float* c, int64_t ldc) {
  const bf16* below = a + 16 * lda;  // 16 rows further; for rows in tiles too, where lda is k
  const bf16* second = pack + depth * kGroup;
  const int64_t a_stride = Tiled ? 64 : lda * sizeof(bf16), a_step = Tiled ? 16 : 1, c_stride = ldc * sizeof(float);
  _tile_zero(0);
  if (Second) _tile_zero(1);
  if (Lower) _tile_zero(2);
  if (Lower && Second) _tile_zero(3);
  for (int64_t i = 0; i < k; i += 32) {
    if (!Lower) prefetch(pack + i * kGroup);
    if (!Lower && Second) prefetch(second + i * kGroup);
    _tile_loadd(6, pack + i * kGroup, 64);
    _tile_loadd(4, a + i * a_step, a_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (Second) {
      _tile_loadd(7, second + i * kGroup, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (Lower) {
      _tile_loadd(5, below + i * a_step, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if (Second) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  if (Second) _tile_stored(1, c + kGroup, c_stride);
  if (Lower) _tile_stored(2, c + 16 * ldc, c_stride);
  if (Lower && Second) _tile_stored(3, c + 16 * ldc + kGroup, c_stride);
}

template <bool Tiled>
void gemm(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
          int64_t ldc) {
  configure_tiles(m < 16 ? m : 16, m > 16 ? m - 16 : 0);
  for (int g = 0; g < groups; g += 2) {
    const bf16* lines = pack + g * depth * kGroup;
    float* to = c + g * kGroup;
    const bool second = g + 1 < groups;
    if (m > 16 && second) tiles<Tiled, true, true>(a, lda, lines, depth, k, to, ldc);
    else if (m > 16) tiles<Tiled, true, false>(a, lda, lines, depth, k, to, ldc);
    else if (second) tiles<Tiled, false, true>(a, lda, lines, depth, k, to, ldc);
    else tiles<Tiled, false, false>(a, lda, lines, depth, k, to, ldc);
  }
  _tile_release();
}

}  // namespace

void gemm_amx(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
              int64_t ldc) {
  gemm<false>(a, lda, m, pack, depth, k, groups, c, ldc);
}

void gemm_amx_tiled(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups,
                    float* c, int64_t ldc) {
  gemm<true>(a, lda, m, pack, depth, k, groups, c, ldc);
}

}  // namespace baton
