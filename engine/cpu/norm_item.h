// RMSNorm of rows. Include vector_avx512.h or vector_avx2.h first, and define BATON_NORM.
#include <cmath>

#include "norm.h"

namespace baton::norm {
namespace {

constexpr int64_t kElements = 1 << 16;  // for each thread at least

void normalise(const Call& call, int64_t row) {
  const bf16* x = call.x + row * call.stride;
  bf16* out = call.out + row * call.width;
  Vec squares = splat(0);
  for (int i = 0; i < call.width; i += 16) {
    const Vec values = load(x + i);
    squares = mul_add(values, values, squares);
  }
  const Vec scale = splat(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(call.width) + call.eps));
  for (int i = 0; i < call.width; i += 16) {
    const Vec values = mul(load(x + i), scale);
    store(out + i, call.weight == nullptr ? values : mul(values, load(call.weight + i)));
  }
}

void run_norm(const Call& call) {
  auto body = [&](Team& team) {
    int64_t first, last;
    team.split(call.rows, first, last);
    for (int64_t row = first; row < last; ++row) normalise(call, row);
  };
  const int threads = threads_worth(call.threads, call.rows, call.rows * call.width, kElements);
  if (threads > 1) return parallel(threads, body);
  Team alone(0, 1);  // the other threads may belong to another caller
  body(alone);
}

}  // namespace

const Run BATON_NORM = run_norm;

}  // namespace baton::norm
