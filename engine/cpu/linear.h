// Matrix products with weights packed once at load: as bfloat16, as bfloat16 whose exponents are coded (linear_coded.h), as int8
// with a scale for each output (linear_int8.h), or in the 8 or 4 bits of a checkpoint (linear_expanded.h).
//
// The pack of a [n, k] weight is [n / 16][k / 2][16][2]. A 64-byte line holds two neighbouring k of 16 outputs and is
// the operand of one AVX512-BF16 dot product, and a shift and a mask make floats of it where there is none;
// 16 consecutive lines are one AMX tile. A thread that computes some
// outputs reads ONE linear stream, so one copy of the weights serves decode, which is bound by memory bandwidth, and
// prefill, which is bound by arithmetic.
#pragma once
#include <algorithm>
#include <cstdint>

#include "linear_coded.h"
#include "linear_expanded.h"
#include "linear_int8.h"
#include "numeric.h"
#include "pool.h"

namespace baton {

constexpr int kGroup = 16;   // outputs in a line
constexpr int kUnit = 2;     // groups that a large product computes together
constexpr int kFewRows = 8;    // up to this many rows, a product is bound by reading the weights
constexpr int64_t kAheadBytes = 1024;       // that few rows prefetch of the weights while they are multiplied
constexpr int64_t kTaskBytes = 256 << 10;    // of weights, that a thread takes at a time
constexpr int64_t kPanelBytes = 1 << 20;     // of rows that stay in the second-level cache while the weights pass by
constexpr int64_t kPanelRows = 512;         // at most

// c[m, groups * 16] = a[m, k] * the first k inputs of a pack of `depth` inputs; m <= kRowBlock, k a multiple of 32.
using Gemm = void (*)(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);

void gemm_avx2(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
void gemm_avx512(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
void gemm_bf16(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
               int64_t ldc);
void gemm_amx(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
// Memory to prefetch into the second-level cache during a product: some lines at each step.
struct Ahead {
  const char *next, *end;
  int64_t lines_of_step;

  void step() {
    if (next >= end) return;
    for (int64_t line = 0; line < lines_of_step; ++line) __builtin_prefetch(next + 64 * line, 0, 2);
    next += 64 * lines_of_step;
  }
};

// The place of a left side's elements [m, k] in tiles: [m / 16][k / 32][16][32], where the last tiles have only as many
// rows as are left.
struct Tiling {
  int64_t m, k;

  // The elements of a tile that has row `r`: from 32 of its inputs to the next.
  int64_t tile(int64_t r) const { return 32 * std::min<int64_t>(16, m - r / 16 * 16); }
  int64_t place(int64_t r, int64_t input) const {
    return r / 16 * 16 * k + input / 32 * tile(r) + r % 16 * 32 + input % 32;
  }
};

// c[m, kUnit * kGroup] = a[m, k] * a pack of k inputs and up to kUnit groups, for any number of rows, in tiles.
void gemm_amx_panel(const bf16* a, int64_t m, const bf16* pack, int64_t k, int groups, float* c, Ahead ahead);
Gemm gemm_for();  // of current_isa(), which is at least AVX2. AMX for any number of rows if it is available, so that a row's sums do not depend on the batch

enum PackFormat : int32_t {
  kBFloat16Pack = 0,
  kInt8Pack = 1,
  kFp8Pack = 2,
  kMxfp4Pack = 3,
  kNvfp4Pack = 4,
  kInt4By128Pack = 5,  // 128 inputs share a factor
  kInt4By32Pack = 6,
  kCodedPack = 7,  // of bfloat16
};

// The bytes of a group of outputs.
inline int64_t group_bytes(PackFormat format, int64_t k) {
  switch (format) {
    case kInt8Pack: return kGroup * padded_inputs(k);
    case kFp8Pack: return blocks_of(k) * kFp8BlockBytes;
    case kMxfp4Pack: return blocks_of(k) * kMxfp4BlockBytes;
    case kNvfp4Pack: return blocks_of(k) * kNvfp4BlockBytes;
    case kInt4By128Pack: return blocks_of(k) * int4_block_bytes(128);
    case kInt4By32Pack: return blocks_of(k) * int4_block_bytes(32);
    case kCodedPack: return blocks_of(k) * kCodedBlockBytes;
    default: return kGroup * 2 * k;
  }
}

// The right side of a product.
struct Weights {
  const void* pack;
  const float* scales;  // of int8: [outputs]; else null
  PackFormat format;

  Weights from_group(int64_t group, int64_t k) const {
    return {static_cast<const char*>(pack) + group * group_bytes(format, k),
            scales == nullptr ? nullptr : scales + group * kGroup, format};
  }
};

// Ends the use of AMX tiles by this thread's products, because other code on the thread (oneDNN) uses them, too.
void release_tiles();

// Rows of a panel, a multiple of kRowBlock. The panels of a product have the same size.
inline int64_t panel_rows(int64_t m, int64_t row_bytes) {
  const int64_t panels = std::max<int64_t>(1, (m * row_bytes + kPanelBytes - 1) / kPanelBytes);  // m may be 0
  return std::min(kPanelRows, ((m + panels - 1) / panels + kRowBlock - 1) / kRowBlock * kRowBlock);
}

void scale_columns(float* c, int64_t ldc, int rows, int64_t columns, const float* scales);

// The sums of the inputs of each row that share a factor of a pack.
struct InputSums {
  const float* data = nullptr;
  int64_t stride = 0;  // sums from one row to the next

  float at(int64_t row, int64_t factor) const { return data[row * stride + factor]; }
  InputSums from_row(int64_t row) const { return {data + row * stride, stride}; }
};

// The left side of a product.
struct Input {
  const bf16* data;
  int64_t stride;  // elements from one row to the next; in tiles, k
  bool tiled;  // for AMX
  Int8Rows rounded = {};  // the same for a pack of int8; if there are none, each thread rounds all rows for itself
  InputSums sums = {};  // for a pack of int4

  Input from_row(int64_t row) const {  // a multiple of kRowBlock
    return {data + row * stride, stride, tiled, rounded ? rounded.from_row(row) : rounded, sums.from_row(row)};
  }
};

// Of rows [m, k], in this thread's working_memory(). None but for a pack of int4.
InputSums input_sums(const Input& a, int64_t m, int64_t k, PackFormat format);

// c[m, kUnit * kGroup] = a[m, k] * a pack of fp8, MXFP4, NVFP4 or int4 of up to kUnit groups, for any number of rows, which are not
// in tiles. A block is expanded once for all rows.
using GemmExpanded = void (*)(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c);
void gemm_expanded_avx2(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c);
void gemm_expanded_avx512(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c);
void gemm_expanded_bf16(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c);
GemmExpanded gemm_expanded_for();  // of current_isa(), which is at least AVX2

// Rounds rows, which are not in tiles. `here`: by this thread, in its working_memory(). `together`: by the team, which
// waits for the end, in shared memory of Int8Rows::bytes(m, k).
Int8Rows rounded_here(Input a, int64_t m, int64_t k);
Int8Rows rounded_together(Team& team, Input a, int64_t m, int64_t k, char* memory);
Input tiled_together(Team& team, Input a, int64_t m, int64_t k, bf16* memory);  // memory for m * k elements
char* working_memory(int64_t bytes);  // of this thread, aligned to 64, valid until the next call

// Few rows wait for the weights: those after the next lines are on their way while sums are finished.
inline void prefetch_after(const Weights& weights) {
  const char* lines = static_cast<const char*>(weights.pack) + kAheadBytes;
  for (int line = 0; line < 32; ++line) __builtin_prefetch(lines + 64 * line, 0, 2);
}

// The weights of the next unit, for the steps of a panel's product with this one. The hardware prefetcher alone starts too
// late: then a panel's first rows wait for the weights.
inline Ahead next_unit(const Weights& weights, int64_t k, int groups, int64_t rows) {
  const char* from = static_cast<const char*>(weights.pack);
  return {from, from + 2 * groups * kGroup * k, std::max<int64_t>(1, groups * kGroup * kRowBlock / rows)};
}

// Computes this thread's part of a product with n = 16 * groups outputs. `done(c, ldc, row, rows, group, groups)` gets
// each finished block of float32 sums while it is in the cache. There is no barrier: one comes before the next product.
template <typename Done>
void matmul(Team& team, Input a, int64_t m, Weights weights, int64_t k, int64_t groups, Done done) {
  const bool int8 = weights.format == kInt8Pack, coded = weights.format == kCodedPack;
  const bool expanded = weights.format > kInt8Pack && !coded;
  const Int8Rows rounded = !int8 || a.rounded ? a.rounded : rounded_here(a, m, k);
  a.sums = input_sums(a, m, k, weights.format);
  const GemmInt8 gemm_int8 = gemm_int8_for(m);
  const Gemm gemm = gemm_for();
  const GemmExpanded gemm_expanded = gemm_expanded_for();
  const GemmCoded gemm_coded = coded ? gemm_coded_for() : nullptr;
  const int64_t panel = panel_rows(m, int8 ? k : 2 * k), ldc = kUnit * kGroup;
  alignas(64) float c[kPanelRows * kUnit * kGroup];
  auto compute = [&](int64_t start, int64_t end, int64_t first, int64_t last) {  // rows and groups, from and to
    for (int64_t group = first; group < last; group += kUnit) {
      const int count = static_cast<int>(std::min<int64_t>(last - group, kUnit));
      const Weights unit = weights.from_group(group, k), next = weights.from_group(group + count, k);
      int64_t row = start;
      const bf16* lines = static_cast<const bf16*>(unit.pack);
      if (gemm_coded != nullptr) {
        row = std::min<int64_t>(end, start + kCodedRows);
        bf16* kept = row < end ? line_memory(count * kGroup * k) : nullptr;
        gemm_coded({a.data + start * a.stride, a.stride, false}, row - start, unit, k, count, c, ldc, kept);
        if (m <= kFewRows) prefetch_after(next);
        done(c, ldc, start, static_cast<int>(row - start), group, count);
        lines = kept;
      } else if (coded) {
        lines = decoded(unit, k, count);
      }
      if (a.tiled || expanded) {
        const Input rows = a.from_row(start);
        if (expanded) gemm_expanded(rows, end - start, unit, k, count, c);
        else
          gemm_amx_panel(rows.data, end - start, static_cast<const bf16*>(unit.pack), k, count, c,
                         next_unit(next, k, count, end - start));
        if (m <= kFewRows) prefetch_after(next);
        done(c, ldc, start, static_cast<int>(end - start), group, count);
        continue;
      }
      for (; row < end; row += kRowBlock) {
        const int rows = static_cast<int>(std::min<int64_t>(end - row, kRowBlock));
        if (int8) {
          gemm_int8(rounded.block(row), static_cast<const uint8_t*>(unit.pack), padded_inputs(k), count, c, ldc);
          scale_columns(c, ldc, rows, count * kGroup, unit.scales);
        } else {
          gemm(a.data + row * a.stride, a.stride, rows, lines, k, k, count, c, ldc);
        }
        if (m <= kFewRows) prefetch_after(next);
        done(c, ldc, row, rows, group, count);
      }
    }
  };
  const int64_t task_groups = kUnit * std::max<int64_t>(1, kTaskBytes / group_bytes(weights.format, kUnit * k));
  Shares tasks(team, (groups + task_groups - 1) / task_groups);
  for (int64_t task; tasks.take(task);)
    for (int64_t start = 0; start < m; start += panel)
      compute(start, std::min(m, start + panel), task * task_groups, std::min(groups, (task + 1) * task_groups));
  release_tiles();
}

}  // namespace baton
