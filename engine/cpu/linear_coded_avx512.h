// Packs of coded bfloat16 with AVX-512, and with AVX512-BF16 where a file is compiled for it. Define BATON_GEMM_CODED first.
#include <algorithm>
#include <array>
#include <utility>

#include "vector_avx512.h"

#include "linear.h"
#include "linear_rows_avx512.h"

namespace baton {
namespace {

constexpr int64_t kAhead = 4096;  // bytes to prefetch, into the second-level cache

// A block. Every line of it asks for one ahead, that of the header, too: waiting for one line in 49 takes a quarter of the time.
class Coded {
 public:
  explicit Coded(const uint8_t* block)
      : upper_(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(block)))),
        steps_(block + kCodedHeader) {
    ask_ahead(block);
  }

  // The lines of inputs i to i + 7.
  void lines_of(int i, __m512i* lines) const {
    const uint8_t* step = steps_ + i / kStepInputs * kCodedStep;
    for (int line = 0; line < 3; ++line) ask_ahead(step + 64 * line);
    const __m512i both = _mm512_load_si512(step), half = _mm512_set1_epi8(15);
    const __m512i first = _mm512_load_si512(step + 64), second = _mm512_load_si512(step + 128);
    const __m512i a = _mm512_shuffle_epi8(upper_, _mm512_and_si512(both, half));
    const __m512i b = _mm512_shuffle_epi8(upper_, _mm512_and_si512(_mm512_srli_epi16(both, 4), half));
    lines[0] = _mm512_unpacklo_epi8(first, a);
    lines[1] = _mm512_unpackhi_epi8(first, a);
    lines[2] = _mm512_unpacklo_epi8(second, b);
    lines[3] = _mm512_unpackhi_epi8(second, b);
  }

 private:
  static void ask_ahead(const uint8_t* line) { __builtin_prefetch(line + kAhead, 0, 2); }

  const __m512i upper_;
  const uint8_t* steps_;
};

void decode(const uint8_t* block, int inputs, bf16* to) {
  const Coded coded(block);
  for (int i = 0; i < inputs; i += kStepInputs) {
    __m512i lines[4];
    coded.lines_of(i, lines);
    for (int line = 0; line < 4; ++line) _mm512_storeu_si512(to + 16 * i + 32 * line, lines[line]);
  }
  Patches::of(block).apply(to);
}

// Adds the products of patches to sums [m][16] of their outputs, less those of what their codes stand for.
__attribute__((noinline)) void add_patches(const uint8_t* block, const bf16* a, int64_t lda, int m, float* sums) {
  const float coded = to_float(patched_number(block));
  for (const auto* patch = Patches::of(block).patches; patch->place != Patches::kNone; ++patch) {
    const float lacking = to_float(bf16{patch->bits}) - coded;
    for (int row = 0; row < m; ++row) sums[row * kGroup + patch->output()] += to_float(a[row * lda + patch->input()]) * lacking;
  }
}

// One group times M rows. If it is to Keep them, lines go to memory, too.
template <int M, bool Keep>
void multiply(const Input& a, const uint8_t* block, int64_t k, float* c, int64_t ldc, bf16* kept) {
  constexpr int kParts = M <= 2 ? 4 : M <= 4 ? 2 : 1;  // independent sums, to cover the latency of a dot product
  Vec sums[kParts][M];
  for (auto& part : sums)
    for (auto& sum : part) sum = splat(0);
  alignas(64) float of_patches[M * kGroup] = {};
  for (int64_t first = 0; first < k; first += kBlockInputs, block += kCodedBlockBytes) {
    const int inputs = static_cast<int>(std::min<int64_t>(kBlockInputs, k - first));
    const BlockRows<M> rows(a.data + first, a.stride, inputs);
    const Coded coded(block);
    for (int i = 0; i < inputs; i += kStepInputs) {
      __m512i lines[4];
      coded.lines_of(i, lines);
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        if (Keep) _mm512_store_si512(kept + 16 * (first + i) + 32 * line, lines[line]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
          sums[line % kParts][m] = rows.add(sums[line % kParts][m], m, i + 2 * line, lines[line]);
      }
    }
    if (__builtin_expect(Patches::of(block).any(), 0)) {
      add_patches(block, a.data + first, a.stride, M, of_patches);
      if (Keep) Patches::of(block).apply(kept + 16 * first);
    }
  }
  for (int m = 0; m < M; ++m) {
    Vec sum = load(of_patches + m * kGroup);
    for (int part = 0; part < kParts; ++part) sum = add(sum, sums[part][m]);
    store(c + m * ldc, sum);
  }
}

using Multiply = void (*)(const Input& a, const uint8_t* block, int64_t k, float* c, int64_t ldc, bf16* kept);

template <size_t... M>
constexpr std::array<Multiply, kCodedRows> by_rows(std::index_sequence<M...>) {
  return {multiply<M + 1, false>...};
}

}  // namespace

// One group after the other, as one stream.
void BATON_GEMM_CODED(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c, int64_t ldc,
                      bf16* kept) {
  static constexpr auto few = by_rows(std::make_index_sequence<kCodedRows>());
  const Multiply kernel = kept == nullptr ? few[m - 1] : multiply<kCodedRows, true>;
  for (int g = 0; g < groups; ++g, c += kGroup, kept += kGroup * k)
    kernel(a, static_cast<const uint8_t*>(weights.from_group(g, k).pack), k, c, ldc, kept);
}

}  // namespace baton
