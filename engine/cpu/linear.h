// Matrix products with weights packed once at load, as bfloat16 or as int8 with a scale for each output
// (linear_int8.h).
//
// The pack of a [n, k] weight is [n / 16][k / 2][16][2]. A 64-byte line holds two neighbouring k of 16 outputs and is
// the operand of one AVX512-BF16 dot product, and two shifts make floats of it for AVX2;
// 16 consecutive lines are one AMX tile. A thread that computes some
// outputs reads ONE linear stream, so one copy of the weights serves decode, which is bound by memory bandwidth, and
// prefill, which is bound by arithmetic.
#pragma once
#include <cstdint>

#include "linear_int8.h"
#include "numeric.h"
#include "pool.h"

namespace baton {

constexpr int kGroup = 16;   // outputs in a line
constexpr int kUnit = 2;     // groups that a large product computes together
constexpr int kFewRows = 8;    // up to this many rows, a product is bound by reading the weights

// c[m, groups * 16] = a[m, k] * the first k inputs of a pack of `depth` inputs; m <= kRowBlock, k a multiple of 32.
using Gemm = void (*)(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);

void gemm_avx2(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
void gemm_avx512(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
void gemm_amx(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups, float* c,
                 int64_t ldc);
// The same for rows in tiles, [rows / 16][k / 32][16][32], the format that AMX loads.
void gemm_amx_tiled(const bf16* a, int64_t lda, int m, const bf16* pack, int64_t depth, int64_t k, int groups,
                    float* c, int64_t ldc);
Gemm gemm_for();  // of current_isa(), which is at least AVX2. AMX for any number of rows if it is available, so that a row's sums do not depend on the batch

// The right side of a product: a pack of bfloat16, or of int8 with a scale for each output.
struct Weights {
  const void* pack;
  const float* scales;  // [outputs], or null for bfloat16

  Weights from_group(int64_t group, int64_t k) const {
    const int64_t bytes = group * kGroup * (scales == nullptr ? 2 * k : padded_inputs(k));
    return {static_cast<const char*>(pack) + bytes, scales == nullptr ? nullptr : scales + group * kGroup};
  }
};

void scale_columns(float* c, int64_t ldc, int rows, int64_t columns, const float* scales);

// The left side of a product.
struct Input {
  const bf16* data;
  int64_t stride;  // elements from one row to the next; in tiles, k
  bool tiled;
  Int8Rows rounded = {};  // the same for a pack of int8; if there are none, each thread rounds all rows for itself

  Input from_row(int64_t row) const {  // a multiple of kRowBlock
    return {data + row * stride, stride, tiled, rounded ? rounded.from_row(row) : rounded};
  }
};

// Rounds rows, which are not in tiles. `here`: by this thread, in its working_memory(). `together`: by the team, which
// waits for the end, in shared memory of Int8Rows::bytes(m, k).
Int8Rows rounded_here(Input a, int64_t m, int64_t k);
Int8Rows rounded_together(Team& team, Input a, int64_t m, int64_t k, char* memory);
char* working_memory(int64_t bytes);  // of this thread, aligned to 64, valid until the next call

// Computes this thread's part of a product with n = 16 * groups outputs. `done(c, ldc, row, rows, group, groups)` gets
// each finished block of float32 sums while it is in the cache. There is no barrier.
template <typename Done>
void matmul(const Team& team, Input a, int64_t m, Weights weights, int64_t k, int64_t groups, Done done) {
  alignas(64) float c[kRowBlock * kUnit * kGroup];
  const bool int8 = weights.scales != nullptr;
  const Int8Rows rounded = !int8 || a.rounded ? a.rounded : rounded_here(a, m, k);
  const GemmInt8 gemm_int8 = gemm_int8_for(m);
  const Gemm gemm = a.tiled ? gemm_amx_tiled : gemm_for();
  int64_t first, last;
  team.split((groups + kUnit - 1) / kUnit, first, last);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t group = unit * kUnit;
    const int count = static_cast<int>(groups - group < kUnit ? groups - group : kUnit);
    const Weights unit_weights = weights.from_group(group, k);
    for (int64_t row = 0; row < m; row += kRowBlock) {
      const int rows = static_cast<int>(m - row < kRowBlock ? m - row : kRowBlock);
      if (int8) {
        gemm_int8(rounded.block(row), static_cast<const uint8_t*>(unit_weights.pack), padded_inputs(k), count, c,
                  kUnit * kGroup);
        scale_columns(c, kUnit * kGroup, rows, count * kGroup, unit_weights.scales);
      } else {
        gemm(a.data + row * a.stride, a.stride, rows, static_cast<const bf16*>(unit_weights.pack), k, k, count, c,
             kUnit * kGroup);
      }
      done(c, kUnit * kGroup, row, rows, group, count);
    }
  }
}

}  // namespace baton
