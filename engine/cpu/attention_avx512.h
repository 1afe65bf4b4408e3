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

// Rows whose lines are asked for into the first-level cache while a row is read. Few query rows take little time.
template <int R>
constexpr int kNear = R <= 2 ? 16 : 8;

// Dot products of R query rows with 16 keys. Four keys at a time: 4 R independent sums, K read once for all rows.
// Dim: the head's width, or 0 if it is none of those that score_tile knows.
template <int R, int Dim>
void score_keys(Rows<bf16>& rows, const bf16* const* keys, const bf16* const* ahead, int r0, int j0, int n, int any_dim,
                __m512 scale) {
  const int dim = Dim > 0 ? Dim : any_dim;
  __m512 sums[R][16];
  for (int j = 0; j < 16; j += 4) {
    const bf16* k[4];
    for (int i = 0; i < 4; ++i) {
      const int at = std::min(j0 + j + i, n - 1);
      k[i] = keys[at];
      prefetch_rows(ahead[at], keys[std::min(at + kNear<R>, n - 1)], dim);
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

template <int Dim>
void score_rows(Rows<bf16>& rows, const bf16* const* keys, const bf16* const* ahead, int n, int dim, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int j = 0; j < n; j += 16) {
    int r = 0;
    for (; r + 4 <= rows.count; r += 4) score_keys<4, Dim>(rows, keys, ahead, r, j, n, dim, factor);
    for (; r + 2 <= rows.count; r += 2) score_keys<2, Dim>(rows, keys, ahead, r, j, n, dim, factor);
    for (; r < rows.count; ++r) score_keys<1, Dim>(rows, keys, ahead, r, j, n, dim, factor);
  }
}

template <>
void score_tile<bf16>(Rows<bf16>& rows, const bf16* const* keys, const bf16* const* ahead, int n, int dim,
                      float scale) {
  const auto score = dim == 128 ? score_rows<128> : dim == 64 ? score_rows<64> : score_rows<0>;
  score(rows, keys, ahead, n, dim, scale);
}

// Dimensions 32 c .. 32 c + 31, as unpacking two rows of V orders them: of each eight the first four are in `low`.
struct Sums {
  __m512 low, high;
};

// Pairs of the same dimension of two rows of V, for a product with the pair of their weights.
struct ValuePairs {
  Pairs low, high;
};

inline ValuePairs value_pairs(const bf16* first, const bf16* second, __mmask16 lanes) {
  const __m512i a = _mm512_maskz_loadu_epi32(lanes, first), b = _mm512_maskz_loadu_epi32(lanes, second);
  return {pairs(_mm512_unpacklo_epi16(a, b)), pairs(_mm512_unpackhi_epi16(a, b))};
}

inline Sums load_sums(const float* from) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
  const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 16);
  return {_mm512_permutex2var_ps(a, low, b), _mm512_permutex2var_ps(a, high, b)};
}

inline void store_sums(float* to, Sums sums) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_store_ps(to, _mm512_permutex2var_ps(sums.low, first, sums.high));
  _mm512_store_ps(to + 16, _mm512_permutex2var_ps(sums.low, second, sums.high));
}

// Weights of two tokens each, in bfloat16, as attention by products has them. An odd last token is paired with a weight of 0.
using WeightPairs = int32_t[kTile / 2];

// R rows x C times 32 dimensions stay in registers over the whole tile.
template <int R, int C>
void add_block(Rows<bf16>& rows, const WeightPairs* weights, const bf16* const* values, const bf16* const* ahead, int n,
               int dim, int r0, int d0) {
  const __mmask16 lanes = C > 1 || dim - d0 >= 32 ? 0xffff : 0xff;
  Sums acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load_sums(&rows.acc[r0 + r][d0 + 32 * c]);
  for (int j = 0; j < n; j += 2) {
    const int last = n - 1;
    const bf16 *first = values[j] + d0, *second = values[std::min(j + 1, last)] + d0;
    for (int i = j; i < j + 2 && r0 == 0; ++i)
      prefetch_rows(ahead[std::min(i, last)] + d0, values[std::min(i + kNear<R>, last)] + d0, 32 * C);
    Pairs p[R];
    for (int r = 0; r < R; ++r) p[r] = pairs(_mm512_set1_epi32(weights[r0 + r][j / 2]));
    for (int c = 0; c < C; ++c) {
      const ValuePairs v = value_pairs(first + 32 * c, second + 32 * c, lanes);
      for (int r = 0; r < R; ++r) acc[r][c] = {dot(acc[r][c].low, p[r], v.low), dot(acc[r][c].high, p[r], v.high)};
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store_sums(&rows.acc[r0 + r][d0 + 32 * c], acc[r][c]);
}

template <int R>
void add_rows(Rows<bf16>& rows, const WeightPairs* weights, const bf16* const* values, const bf16* const* ahead, int n,
              int dim, int r0) {
  int d = 0;
  if (R <= 2)  // a row of V is read, and the next one is asked for, in one piece
    for (; d + 128 <= dim; d += 128) add_block<R, 4>(rows, weights, values, ahead, n, dim, r0, d);
  for (; d + 64 <= dim; d += 64) add_block<R, 2>(rows, weights, values, ahead, n, dim, r0, d);
  for (; d < dim; d += 32) add_block<R, 1>(rows, weights, values, ahead, n, dim, r0, d);
}

template <>
void add_values<bf16>(Rows<bf16>& rows, const bf16* const* values, const bf16* const* ahead, int n, int dim) {
  alignas(64) WeightPairs weights[kRows];
  for (int r = 0; r < rows.count; ++r) {
    std::fill(rows.scores[r] + n, rows.scores[r] + kTile, 0.0f);
    bf16* to = reinterpret_cast<bf16*>(weights[r]);
    for (int j = 0; j < kTile; j += 16) store(to + j, _mm512_load_ps(&rows.scores[r][j]));
  }
  int r = 0;
  for (; r + 4 <= rows.count; r += 4) add_rows<4>(rows, weights, values, ahead, n, dim, r);
  for (; r + 2 <= rows.count; r += 2) add_rows<2>(rows, weights, values, ahead, n, dim, r);
  for (; r < rows.count; ++r) add_rows<1>(rows, weights, values, ahead, n, dim, r);
}
