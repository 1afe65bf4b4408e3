// One work item of latent attention, compiled once per instruction set (BATON_KERNELS names the function it defines).
// Products are blocked by hand over the compiler's vector type, which every target has.
#include <algorithm>
#include <cstring>

#include "mla.h"
#include "mla_rows.h"
#include "numeric.h"

namespace baton::mla {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kWide = kLanes == 16 ? 4 : 2;  // with kDeep x kWide sums in registers, and what they are summed from
constexpr int kDeep = 4;

typedef float Vec __attribute__((vector_size(sizeof(float) * kLanes), may_alias));

inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }
inline int padded(int n) { return (n + 15) / 16 * 16; }

// What a thread works on; too large for a small stack. Rows of q and tile are `width` floats apart, rows of acc
// `rank` floats, both padded to whole vectors.
struct Block {
  alignas(64) float q[kRows * kMaxRow];
  alignas(64) float tile[kTile * kMaxRow];
  alignas(64) float acc[kRows * kMaxRank];
  alignas(64) float scores[kRows][kTile];
  int rows, width, rank;
  int visible[kRows];  // context tokens a query may see
  float top[kRows];    // running maximum of its scores
  float sum[kRows];
};

inline float sum_lanes(const Vec& v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Scores of R queries with kWide context rows.
template <int R>
inline void score_block(Block& b, int r0, int j0, float scale) {
  Vec sums[R][kWide] = {};
  const float *q = b.q + r0 * b.width, *keys = b.tile + j0 * b.width;
  for (int d = 0; d < b.width; d += kLanes) {
    Vec key[kWide];
    for (int i = 0; i < kWide; ++i) key[i] = at(keys + i * b.width + d);
    for (int r = 0; r < R; ++r) {
      const Vec query = at(q + r * b.width + d);
      for (int i = 0; i < kWide; ++i) sums[r][i] += query * key[i];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < kWide; ++i) b.scores[r0 + r][j0 + i] = sum_lanes(sums[r][i]) * scale;
}

// acc += weights * latents, for R queries and C vectors of the latent from d0 on.
template <int R, int C>
inline void add_block(Block& b, int r0, int d0, int n) {
  Vec acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = at(b.acc + (r0 + r) * b.rank + d0 + c * kLanes);
  const float* row = b.tile + d0;
  for (int j = 0; j < n; ++j, row += b.width) {
    Vec value[C];
    for (int c = 0; c < C; ++c) value[c] = at(row + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const float weight = b.scores[r0 + r][j];
      for (int c = 0; c < C; ++c) acc[r][c] += weight * value[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) at(b.acc + (r0 + r) * b.rank + d0 + c * kLanes) = acc[r][c];
}

void score_tile(Block& b, int n, float scale) {
  for (int j = 0; j < n; j += kWide) {  // past n the tile holds old rows; nobody reads those scores
    int r = 0;
    for (; r + kDeep <= b.rows; r += kDeep) score_block<kDeep>(b, r, j, scale);
    for (; r < b.rows; ++r) score_block<1>(b, r, j, scale);
  }
}

template <int C>
void add_columns(Block& b, int d, int n) {
  int r = 0;
  for (; r + kDeep <= b.rows; r += kDeep) add_block<kDeep, C>(b, r, d, n);
  for (; r < b.rows; ++r) add_block<1, C>(b, r, d, n);
}

void add_tile(Block& b, int n) {
  int d = 0;
  for (; d + kWide * kLanes <= b.rank; d += kWide * kLanes) add_columns<kWide>(b, d, n);
  for (; d < b.rank; d += kLanes) add_columns<1>(b, d, n);
}

// One online-softmax step: scores become weights, earlier sums are rescaled.
void weigh_tile(Block& b, int from, int n) {
  for (int r = 0; r < b.rows; ++r) {
    float* s = b.scores[r];
    const int seen = std::clamp(b.visible[r] - from, 0, n);
    float top = b.top[r];
#pragma omp simd reduction(max : top)
    for (int j = 0; j < seen; ++j) top = s[j] > top ? s[j] : top;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < seen; ++j) {
      s[j] = fast_exp(s[j] - top);
      sum += s[j];
    }
    std::fill(s + seen, s + n, 0.0f);
    const float keep = fast_exp(b.top[r] - top);
    if (keep != 1.0f)
      for (int d = 0; d < b.rank; d += kLanes) at(b.acc + r * b.rank + d) *= keep;
    b.sum[r] = b.sum[r] * keep + sum;
    b.top[r] = top;
  }
}

// The queries of an item, token after token. Returns how many context tokens the last of them sees.
int begin(Block& b, const Call& call, const Item& item) {
  const int row = call.rank + call.rope_dim;
  const int64_t start = call.starts[item.seq];
  const int before = call.seq_lens[item.seq] - static_cast<int>(call.starts[item.seq + 1] - start);
  b.width = padded(row);
  b.rank = padded(call.rank);
  b.rows = 0;
  for (int token = item.first; token < item.last; ++token) {
    for (int head = item.head; head < item.head + item.heads; ++head) {
      const int r = b.rows++;
      float* q = b.q + r * b.width;
      read_activations(call, call.q_latent, (start + token) * call.q_latent_token + head * call.q_latent_head,
                       call.rank, q);
      read_activations(call, call.q_rope, (start + token) * call.q_rope_token + head * call.q_rope_head, call.rope_dim,
                       q + call.rank);
      std::fill(q + row, q + b.width, 0.0f);
      b.visible[r] = std::min(item.to, before + token + 1);
      b.top[r] = -1e30f;
      b.sum[r] = 0;
    }
  }
  for (int j = 0; j < kTile; ++j) std::fill(b.tile + j * b.width + row, b.tile + (j + 1) * b.width, 0.0f);
  std::memset(b.acc, 0, sizeof(float) * b.rows * b.rank);
  return b.visible[b.rows - 1];
}

void finish(Block& b, const Call& call, const Item& item) {
  for (int r = 0; r < b.rows; ++r) {
    float* acc = b.acc + r * b.rank;
    if (item.partial != nullptr) {
      float* partial = item.partial + int64_t{r} * (call.rank + 2);
      std::memcpy(partial, acc, sizeof(float) * call.rank);
      partial[call.rank] = b.top[r];
      partial[call.rank + 1] = b.sum[r];
      continue;
    }
    const float share = 1.0f / b.sum[r];
    for (int d = 0; d < b.rank; d += kLanes) at(acc + d) *= share;
    write_out(call, call.starts[item.seq] + item.first + r / item.heads, item.head + r % item.heads, acc);
  }
}

void attend(const Call& call, const Item& item) {
  static thread_local Block b;
  const int last_visible = begin(b, call, item);
  for (int from = item.from; from < last_visible; from += kTile) {
    const int n = std::min(kTile, last_visible - from);
    for (int j = 0; j < n; ++j) read_row(call, item.seq, from + j, b.tile + j * b.width);
    score_tile(b, n, call.scale);
    weigh_tile(b, from, n);
    add_tile(b, n);
  }
  finish(b, call, item);
}

}  // namespace

const Attend BATON_KERNELS = attend;

}  // namespace baton::mla
