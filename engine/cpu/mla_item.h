// One work item of latent attention, compiled once per instruction set (BATON_KERNELS names the function it defines).
// Products are blocked by hand, with the compiler's vector type, which exists on every target.
#include <algorithm>
#include <cmath>
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
constexpr int kWide = kLanes == 16 ? 4 : 2;  // 4 x kWide vectors of sums and their operands fit into registers
constexpr int kDeep = 4;
static_assert(kTile % (4 * kWide) == 0 && kRows % 16 == 0, "blocks of scores stay inside their array");

typedef float Vec __attribute__((vector_size(sizeof(float) * kLanes), may_alias));

inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }
inline int padded(int n) { return (n + 15) / 16 * 16; }

// The working memory of a thread, which is too large for a small stack. Queries lie side by side, so that scores,
// maxima and weights are computed for a vector of queries at a time. Rows of the tile are `width` floats apart, rows of
// acc `rank`.
struct Block {
  alignas(64) float q[kMaxRow][kRows];
  alignas(64) float tile[kTile * kMaxRow];
  alignas(64) float acc[kRows * kMaxRank];
  alignas(64) float scores[kTile][kRows];
  alignas(64) int visible[kRows];  // context tokens a query may see; 0 where there is no query
  alignas(64) float top[kRows];    // running maximum of its scores
  alignas(64) float sum[kRows];
  alignas(64) float keep[kRows];  // factor for earlier sums in this step
  int rows, lanes;                // number of queries; the same, padded to whole vectors
  int dim, width, rank;           // values of a row; the same, padded to whole vectors; those of the latent, padded
};

// Computes the scores of W vectors of queries with J context rows.
template <int J, int W>
inline void score_block(Block& b, int j0, int r0, float scale) {
  Vec sums[J][W] = {};
  const float* rows = b.tile + j0 * b.width;
  for (int d = 0; d < b.dim; ++d) {
    Vec q[W];
    for (int w = 0; w < W; ++w) q[w] = at(&b.q[d][r0 + w * kLanes]);
    for (int j = 0; j < J; ++j) {
      const float key = rows[j * b.width + d];
      for (int w = 0; w < W; ++w) sums[j][w] += key * q[w];
    }
  }
  for (int j = 0; j < J; ++j)
    for (int w = 0; w < W; ++w) at(&b.scores[j0 + j][r0 + w * kLanes]) = sums[j][w] * scale;
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
      const float weight = b.scores[j][r0 + r];
      for (int c = 0; c < C; ++c) acc[r][c] += weight * value[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) at(b.acc + (r0 + r) * b.rank + d0 + c * kLanes) = acc[r][c];
}

void score_tile(Block& b, int n, float scale) {
  int r = 0;  // past n the tile holds old rows, whose scores are not used
  for (; r + 2 * kLanes <= b.lanes; r += 2 * kLanes)
    for (int j = 0; j < n; j += kWide * 2) score_block<kWide * 2, 2>(b, j, r, scale);
  for (; r < b.lanes; r += kLanes)
    for (int j = 0; j < n; j += kWide * 4) score_block<kWide * 4, 1>(b, j, r, scale);
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
  alignas(64) float top[kRows];
  std::memcpy(top, b.top, sizeof top);
  for (int j = 0; j < n; ++j)
#pragma omp simd
    for (int r = 0; r < b.lanes; ++r) {
      const float score = from + j < b.visible[r] ? b.scores[j][r] : -1e30f;
      top[r] = score > top[r] ? score : top[r];
    }
#pragma omp simd
  for (int r = 0; r < b.lanes; ++r) {
    b.keep[r] = fast_exp(b.top[r] - top[r]);
    b.sum[r] *= b.keep[r];
    b.top[r] = top[r];
  }
  for (int j = 0; j < n; ++j)
#pragma omp simd
    for (int r = 0; r < b.lanes; ++r) {
      const float weight = from + j < b.visible[r] ? fast_exp(b.scores[j][r] - top[r]) : 0.0f;
      b.scores[j][r] = weight;
      b.sum[r] += weight;
    }
  for (int r = 0; r < b.rows; ++r)
    if (b.keep[r] != 1.0f)
      for (int d = 0; d < b.rank; d += kLanes) at(b.acc + r * b.rank + d) *= b.keep[r];
}

// Loads the queries of an item, ordered by token. Returns how many context tokens the last of them sees.
int begin(Block& b, const Call& call, const Item& item) {
  const int64_t start = call.starts[item.seq];
  const int before = call.seq_lens[item.seq] - static_cast<int>(call.starts[item.seq + 1] - start);
  b.dim = call.rank + call.rope_dim;
  b.width = padded(b.dim);
  b.rank = padded(call.rank);
  b.rows = 0;
  for (int token = item.first; token < item.last; ++token) {
    for (int head = item.head; head < item.head + item.heads; ++head) {
      const int r = b.rows++;
      float query[kMaxRow];
      read_activations(call, call.q_latent, (start + token) * call.q_latent_token + head * call.q_latent_head,
                       call.rank, query);
      read_activations(call, call.q_rope, (start + token) * call.q_rope_token + head * call.q_rope_head, call.rope_dim,
                       query + call.rank);
      for (int d = 0; d < b.dim; ++d) b.q[d][r] = query[d];
      b.visible[r] = std::min(item.to, before + token + 1);
    }
  }
  b.lanes = padded(b.rows);
  std::fill(b.visible + b.rows, b.visible + b.lanes, 0);
  std::fill(b.top, b.top + b.lanes, -1e30f);
  std::fill(b.sum, b.sum + b.lanes, 0.0f);
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
    const int head = item.head + r % item.heads;
    const float share = 1.0f / (b.sum[r] + std::exp(sink_of(call, head) - b.top[r]));
    for (int d = 0; d < b.rank; d += kLanes) at(acc + d) *= share;
    write_out(call, call.starts[item.seq] + item.first + r / item.heads, head, acc);
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
