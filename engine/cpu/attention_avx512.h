// AVX-512 forms of score_tile and add_values for bfloat16 K and V. Included inside attention_item.h.
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

// 32 bfloat16 as one operand of a dot product.
#if defined(__AVX512BF16__)
using Pairs = __m512bh;
inline Pairs pairs(__m512i bits) { return (__m512bh)bits; }
inline __m512 dot(__m512 sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }
#else
struct Pairs {
  __m512 even, odd;
};
inline Pairs pairs(__m512i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline __m512 dot(__m512 sum, Pairs a, Pairs b) {
  return _mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, sum));
}
#endif

// Dot products of R query rows with 16 keys. Four keys at a time: 4 R independent sums, K read once for all rows.
template <int R>
void score_keys(Rows<bf16>& rows, const bf16* const* keys, const bf16* const* ahead, int r0, int j0, int n, int dim,
                __m512 scale) {
  __m512 sums[R][16];
  for (int j = 0; j < 16; j += 4) {
    const bf16* k[4];
    for (int i = 0; i < 4; ++i) {
      const int at = std::min(j0 + j + i, n - 1);
      k[i] = keys[at];
      prefetch_rows(ahead[at], keys[std::min(at + kNear, n - 1)], dim);
    }
    __m512 acc[R][4];
    for (auto& row : acc)
      for (auto& sum : row) sum = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 32) {
      const __mmask16 lanes = dim - d >= 32 ? 0xffff : 0xff;
      Pairs q[R];
      for (int r = 0; r < R; ++r) q[r] = pairs(_mm512_maskz_loadu_epi32(lanes, rows.q[r0 + r] + d));
      for (int i = 0; i < 4; ++i) {
        const Pairs key = pairs(_mm512_maskz_loadu_epi32(lanes, k[i] + d));
        for (int r = 0; r < R; ++r) acc[r][i] = dot(acc[r][i], q[r], key);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 4; ++i) sums[r][j + i] = acc[r][i];
  }
  for (int r = 0; r < R; ++r)
    _mm512_store_ps(&rows.scores[r0 + r][j0], _mm512_mul_ps(sum_each(sums[r]), scale));
}

template <>
void score_tile<bf16>(Rows<bf16>& rows, const bf16* const* keys, const bf16* const* ahead, int n, int dim,
                      float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int j = 0; j < n; j += 16) {
    int r = 0;
    for (; r + 4 <= rows.count; r += 4) score_keys<4>(rows, keys, ahead, r, j, n, dim, factor);
    for (; r + 2 <= rows.count; r += 2) score_keys<2>(rows, keys, ahead, r, j, n, dim, factor);
    for (; r < rows.count; ++r) score_keys<1>(rows, keys, ahead, r, j, n, dim, factor);
  }
}

inline __m512 load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

// R rows x C vectors of 16 dimensions stay in registers over the whole tile.
template <int R, int C>
void add_block(Rows<bf16>& rows, const bf16* const* values, const bf16* const* ahead, int n, int r0, int d0) {
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_load_ps(&rows.acc[r0 + r][d0 + 16 * c]);
  for (int j = 0; j < n; ++j) {
    __m512 p[R];
    for (int r = 0; r < R; ++r) p[r] = _mm512_set1_ps(rows.scores[r0 + r][j]);
    if (r0 == 0) prefetch_rows(ahead[j] + d0, values[std::min(j + kNear, n - 1)] + d0, 16 * C);
    for (int c = 0; c < C; ++c) {
      const __m512 v = load_bf16(values[j] + d0 + 16 * c);
      for (int r = 0; r < R; ++r) acc[r][c] = _mm512_fmadd_ps(p[r], v, acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_store_ps(&rows.acc[r0 + r][d0 + 16 * c], acc[r][c]);
}

template <int R>
void add_rows(Rows<bf16>& rows, const bf16* const* values, const bf16* const* ahead, int n, int dim, int r0) {
  int d = 0;
  if (R <= 2)  // a row of V is read, and the next one is asked for, in one piece
    for (; d + 128 <= dim; d += 128) add_block<R, 8>(rows, values, ahead, n, r0, d);
  for (; d + 64 <= dim; d += 64) add_block<R, 4>(rows, values, ahead, n, r0, d);
  for (; d < dim; d += 16) add_block<R, 1>(rows, values, ahead, n, r0, d);
}

template <>
void add_values<bf16>(Rows<bf16>& rows, const bf16* const* values, const bf16* const* ahead, int n, int dim) {
  int r = 0;
  for (; r + 4 <= rows.count; r += 4) add_rows<4>(rows, values, ahead, n, dim, r);
  for (; r + 2 <= rows.count; r += 2) add_rows<2>(rows, values, ahead, n, dim, r);
  for (; r < rows.count; ++r) add_rows<1>(rows, values, ahead, n, dim, r);
}
