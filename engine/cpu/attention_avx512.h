// AVX512-BF16 forms of score_tile and add_values for bfloat16 K and V. Included inside attention_item.h.
#include <immintrin.h>

// Sums of 16 vectors, lane i = sum of v[i]: four levels of pairwise adds instead of 16 separate reductions.
inline __m512 sum_each(__m512* v) {
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    v[i] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(v[2 * i]), _mm512_castps_pd(v[2 * i + 1]))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(v[2 * i]), _mm512_castps_pd(v[2 * i + 1]))));
  // Now v[i] holds, per 128-bit lane, partial sums of vectors 4i .. 4i + 3.
  for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

template <>
void score_tile<bf16>(Rows<bf16>& rows, const bf16* const* keys, int n, int dim, float scale) {
  const int whole = dim & ~31;
  for (int j0 = 0; j0 < n; j0 += 16) {
    for (int r = 0; r < rows.count; ++r) {
      __m512 sums[16];
      for (int j = 0; j < 16; ++j) {
        const bf16* k = keys[std::min(j0 + j, n - 1)];
        __m512 acc = _mm512_setzero_ps();
        for (int d = 0; d < whole; d += 32)
          acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(rows.q[r] + d),
                                 (__m512bh)_mm512_loadu_si512(k + d));
        if (whole != dim)
          acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_maskz_loadu_epi32(0xff, rows.q[r] + whole),
                                 (__m512bh)_mm512_maskz_loadu_epi32(0xff, k + whole));
        sums[j] = acc;
      }
      _mm512_storeu_ps(&rows.scores[r][j0], _mm512_mul_ps(sum_each(sums), _mm512_set1_ps(scale)));
    }
  }
}

inline __m512 load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

// R rows x C vectors of 16 dimensions stay in registers over the whole tile.
template <int R, int C>
void add_block(Rows<bf16>& rows, const bf16* const* values, int n, int r0, int d0) {
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_load_ps(&rows.acc[r0 + r][d0 + 16 * c]);
  for (int j = 0; j < n; ++j) {
    __m512 p[R];
    for (int r = 0; r < R; ++r) p[r] = _mm512_set1_ps(rows.scores[r0 + r][j]);
    for (int c = 0; c < C; ++c) {
      const __m512 v = load_bf16(values[j] + d0 + 16 * c);
      for (int r = 0; r < R; ++r) acc[r][c] = _mm512_fmadd_ps(p[r], v, acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_store_ps(&rows.acc[r0 + r][d0 + 16 * c], acc[r][c]);
}

template <int R>
void add_rows(Rows<bf16>& rows, const bf16* const* values, int n, int dim, int r0) {
  int d = 0;
  for (; d + 64 <= dim; d += 64) add_block<R, 4>(rows, values, n, r0, d);
  for (; d < dim; d += 16) add_block<R, 1>(rows, values, n, r0, d);
}

template <>
void add_values<bf16>(Rows<bf16>& rows, const bf16* const* values, int n, int dim) {
  int r = 0;
  for (; r + 4 <= rows.count; r += 4) add_rows<4>(rows, values, n, dim, r);
  for (; r + 2 <= rows.count; r += 2) add_rows<2>(rows, values, n, dim, r);
  for (; r < rows.count; ++r) add_rows<1>(rows, values, n, dim, r);
}
