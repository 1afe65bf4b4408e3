// AVX512-BF16 and AMX instructions, calculated with AVX-512. Included before a kernel's own lines (g++ -include), so that
// the kernels for CPUs with these instructions run on one without them. Intel's manual (SDM, volume 2) defines results:
// products of bfloat16 are summed in float32, and denormal numbers count as zero.
#pragma once
#include <immintrin.h>

#include <cassert>
#include <cstdint>
#include <cstring>

namespace emulated {

inline __m512 without_denormals(__m512 x) {
  const __m512i exponent = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000));
  return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(exponent, exponent), x);
}

// Numbers 2i, or 2i + 1, of 32 bfloat16.
inline __m512 even(__m512i x) { return without_denormals(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))); }
inline __m512 odd(__m512i x) {
  return without_denormals(_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000u)))));
}

// VDPBF16PS
inline __m512 dot(__m512 sum, __m512bh a, __m512bh b) {
  sum = _mm512_fmadd_ps(odd((__m512i)a), odd((__m512i)b), without_denormals(sum));
  return without_denormals(_mm512_fmadd_ps(even((__m512i)a), even((__m512i)b), without_denormals(sum)));
}

// VCVTNEPS2BF16
inline __m256bh rounded(__m512 x) {
  const __m512i bits = _mm512_castps_si512(without_denormals(x));
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x400000));
  const __m512i chosen = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  return (__m256bh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
}

struct Config {  // of LDTILECFG
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Tiles {  // of one thread
  Config config;
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local Tiles tiles = {};

// The rows of a tile; an instruction that names a tile without rows raises #UD.
inline int rows_of(int tile) {
  assert(tiles.config.palette == 1 && tiles.config.rows[tile] > 0);
  return tiles.config.rows[tile];
}

inline void load_config(const void* from) {
  std::memset(&tiles, 0, sizeof tiles);
  std::memcpy(&tiles.config, from, sizeof tiles.config);
}

inline void release() { std::memset(&tiles, 0, sizeof tiles); }

inline void zero(int tile) {
  rows_of(tile);
  std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

inline void load(int tile, const void* from, int64_t stride) {
  const int rows = rows_of(tile), bytes = tiles.config.row_bytes[tile];
  zero(tile);
  for (int r = 0; r < rows; ++r)
    std::memcpy(tiles.data[tile][r], static_cast<const uint8_t*>(from) + r * stride, bytes);
}

inline void store(int tile, void* to, int64_t stride) {
  for (int r = 0; r < rows_of(tile); ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.data[tile][r], tiles.config.row_bytes[tile]);
}

// The inputs of a product, in words of four bytes; a configuration that does not fit raises #UD.
inline int words(int sum, int a, int b) {
  const Config& config = tiles.config;
  assert(rows_of(a) == rows_of(sum) && config.row_bytes[b] == config.row_bytes[sum]);
  assert(config.row_bytes[a] == 4 * rows_of(b));
  return config.row_bytes[a] / 4;
}

inline __m512i word(int tile, int row, int at) {
  int bits;
  std::memcpy(&bits, tiles.data[tile][row] + 4 * at, 4);
  return _mm512_set1_epi32(bits);
}

// TDPBF16PS
inline void multiply_bf16(int sum, int a, int b) {
  const int depth = words(sum, a, b);
  for (int r = 0; r < rows_of(sum); ++r) {
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int k = 0; k < depth; ++k) {
      const __m512i left = word(a, r, k), right = _mm512_load_si512(tiles.data[b][k]);
      evens = without_denormals(_mm512_fmadd_ps(even(left), even(right), evens));
      odds = without_denormals(_mm512_fmadd_ps(odd(left), odd(right), odds));
    }
    const __m512 both = without_denormals(_mm512_add_ps(evens, odds));
    const __m512 before = without_denormals(_mm512_load_ps(tiles.data[sum][r]));
    _mm512_store_ps(tiles.data[sum][r], without_denormals(_mm512_add_ps(before, both)));
  }
}

// TDPBSUD: signed bytes of the left side, unsigned ones of the right side
inline void multiply_int8(int sum, int a, int b) {
  const int depth = words(sum, a, b);
  for (int r = 0; r < rows_of(sum); ++r) {
    __m512i total = _mm512_load_si512(tiles.data[sum][r]);
    for (int k = 0; k < depth; ++k)
      total = _mm512_dpbusd_epi32(total, _mm512_load_si512(tiles.data[b][k]), word(a, r, k));
    _mm512_store_si512(tiles.data[sum][r], total);
  }
}

}  // namespace emulated

#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps emulated::dot
#define _mm512_cvtneps_pbh emulated::rounded
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply_bf16
#define _tile_dpbsud emulated::multiply_int8
