// The largest element of each row. No result depends on the instruction set, so the compiler makes the versions of the
// loop and chooses between them.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention.h"
#include "numeric.h"
#include "pool.h"

#if defined(__x86_64__)
#define BATON_VERSIONS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BATON_VERSIONS
#endif

namespace baton {
namespace {

constexpr int64_t kBlock = 1024;  // elements that are searched again for the largest one
constexpr int64_t kElements = 1 << 18;  // for each thread at least: waking one takes as long as reading so many

// The maximum of a block, and 0 if all of it is finite, else NaN.
struct Block {
  float top, zero;
};

template <typename T>
inline __attribute__((always_inline)) Block summary(const T* x, int64_t n) {
  float top = -std::numeric_limits<float>::infinity(), zero = 0;
#pragma omp simd reduction(max : top) reduction(+ : zero)
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    top = value > top ? value : top;
    zero += value * 0.0f;
  }
  return {top, zero};
}

BATON_VERSIONS Block summary_of(const float* x, int64_t n) { return summary(x, n); }
BATON_VERSIONS Block summary_of(const bf16* x, int64_t n) { return summary(x, n); }

// Of equal elements the first. A row with a NaN has some place.
template <typename T>
int64_t argmax(const T* row, int64_t columns, bool& is_finite) {
  float top = -std::numeric_limits<float>::infinity(), zero = 0;
  int64_t from = 0;
  for (int64_t at = 0; at < columns; at += kBlock) {
    const Block block = summary_of(row + at, std::min(kBlock, columns - at));
    zero += block.zero;
    if (block.top > top) {
      top = block.top;
      from = at;
    }
  }
  is_finite = zero == 0;
  for (int64_t i = from; i < std::min(from + kBlock, columns); ++i)
    if (to_float(row[i]) == top) return i;
  return 0;
}

}  // namespace
}  // namespace baton

extern "C" {

// tokens[r] = the place of the largest of rows[r, columns]; `stride` elements from one row to the next.
void baton_argmax(const void* elements, int32_t storage, int64_t rows, int64_t columns, int64_t stride, int64_t* tokens,
                  bool* is_finite, int threads) {
  auto body = [&](baton::Team& team) {
    int64_t first, last;
    team.split(rows, first, last);
    for (int64_t r = first; r < last; ++r)
      tokens[r] = storage == baton::kFloat32
                      ? baton::argmax(static_cast<const float*>(elements) + r * stride, columns, is_finite[r])
                      : baton::argmax(static_cast<const baton::bf16*>(elements) + r * stride, columns, is_finite[r]);
  };
  baton::parallel(baton::threads_worth(threads, rows, rows * columns, baton::kElements), body);
}
}
