// AVX2 forms of score_tile and add_values for bfloat16 K and V. Included inside attention_item.h.
#include <immintrin.h>

constexpr int kNear = 8;  // rows whose lines are asked for into the first-level cache while a row is read

// 16 bfloat16 as floats: those at even places, and those at odd ones.
struct Pairs {
  __m256 even, odd;
};
inline Pairs pairs(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}

// The sums of four vectors.
inline __m128 sum_each(const __m256* v) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// Dot products of R query rows with 4 keys: 4 R independent sums, K read once for all rows.
template <int R>
void score_keys(Rows<bf16>& rows, const bf16* const* k, int r0, int j, int dim, float scale) {
  __m256 acc[R][4];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[r][i] = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 16) {
    Pairs q[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) q[r] = pairs(rows.q[r0 + r] + d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Pairs key = pairs(k[i] + d);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r)
        acc[r][i] = _mm256_fmadd_ps(q[r].odd, key.odd, _mm256_fmadd_ps(q[r].even, key.even, acc[r][i]));
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r)
    _mm_store_ps(&rows.scores[r0 + r][j], _mm_mul_ps(sum_each(acc[r]), _mm_set1_ps(scale)));
}

template <>
void score_tile<bf16>(Rows<bf16>& rows, const bf16* const* keys, const bf16* const* ahead, int n, int dim,
                      float scale) {
  for (int j = 0; j < n; j += 4) {
    const bf16* k[4];
    for (int i = 0; i < 4; ++i) {
      const int at = std::min(j + i, n - 1);
      k[i] = keys[at];
      prefetch_rows(ahead[at], keys[std::min(at + kNear, n - 1)], dim);
    }
    int r = 0;
    for (; r + 2 <= rows.count; r += 2) score_keys<2>(rows, k, r, j, dim, scale);
    if (r < rows.count) score_keys<1>(rows, k, r, j, dim, scale);
  }
}

// R rows x C vectors of 8 dimensions stay in registers over the whole tile.
template <int R, int C>
void add_block(Rows<bf16>& rows, const bf16* const* values, const bf16* const* ahead, int n, int dim, int r0, int d0) {
  __m256 acc[R][C];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = _mm256_load_ps(&rows.acc[r0 + r][d0 + 8 * c]);
  for (int j = 0; j < n; ++j) {
    if (r0 == 0 && d0 == 0) prefetch_rows(ahead[j], values[std::min(j + kNear, n - 1)], dim);
    __m256 p[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) p[r] = _mm256_set1_ps(rows.scores[r0 + r][j]);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values[j] + d0 + 8 * c));
      const __m256 v = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) acc[r][c] = _mm256_fmadd_ps(p[r], v, acc[r][c]);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm256_store_ps(&rows.acc[r0 + r][d0 + 8 * c], acc[r][c]);
}

template <int R>
void add_rows(Rows<bf16>& rows, const bf16* const* values, const bf16* const* ahead, int n, int dim, int r0) {
  int d = 0;
  for (; d + 32 <= dim; d += 32) add_block<R, 4>(rows, values, ahead, n, dim, r0, d);
  for (; d < dim; d += 16) add_block<R, 2>(rows, values, ahead, n, dim, r0, d);
}

template <>
void add_values<bf16>(Rows<bf16>& rows, const bf16* const* values, const bf16* const* ahead, int n, int dim) {
  int r = 0;
  for (; r + 2 <= rows.count; r += 2) add_rows<2>(rows, values, ahead, n, dim, r);
  if (r < rows.count) add_rows<1>(rows, values, ahead, n, dim, r);
}
