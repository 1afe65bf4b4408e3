// Products of int8 weights with rows that are rounded to int8, in blocks of inputs, when they arrive.
//
// The pack of a [n, k] weight is [n / 16][k / 4][16][4] unsigned bytes, weight + 128; inputs are padded with zeros to whole
// 64 (`padded`). A 64-byte line holds four neighbouring inputs of 16 outputs and is the operand of one VNNI dot product;
// 16 consecutive lines are one AMX tile. In a block of kScaleInputs inputs the sum of a row and an output is an integer,
// which is exact in any order; its float32 product with the row's scale of that block is added to the sum over blocks, one
// block after the other, with one rounding. So a result has the same bits on every instruction set and in every batch.
#pragma once
#include <algorithm>
#include <cstdint>

#include "numeric.h"

namespace baton {

constexpr int kTileInputs = 64;    // inputs of one AMX tile
constexpr int kScaleInputs = 128;  // inputs of a row that share a scale, a multiple of kTileInputs
constexpr int kRowBlock = 32;      // rows of one kernel call in a large product

inline int64_t padded_inputs(int64_t k) { return (k + kTileInputs - 1) / kTileInputs * kTileInputs; }

// Up to kRowBlock rounded rows: what one kernel call reads.
struct Int8Block {
  const int8_t* values;   // [inputs / 64][rows][64], -127..127
  const float* scales;    // [blocks][rows]: a value times its scale is about the input
  const int32_t* starts;  // [blocks][rows]: -128 times the sum of the values, since weights are stored with 128 added
  int rows;
};

// All rows of a left side, rounded: their Int8Blocks one after the other, all in one piece of memory.
class Int8Rows {
 public:
  static int64_t bytes(int64_t rows, int64_t k) { return rows * (padded_inputs(k) + 8 * blocks(k)); }

  Int8Rows() = default;  // of no left side
  // `memory`: of bytes(rows, k), aligned to 64.
  Int8Rows(char* memory, int64_t rows, int64_t k) : memory_(memory), rows_(rows), k_(k) {}

  explicit operator bool() const { return memory_ != nullptr; }

  Int8Rows from_row(int64_t row) const {  // a multiple of kRowBlock
    Int8Rows rest = *this;
    rest.first_ += row;
    return rest;
  }

  Int8Block block(int64_t row) const {  // of rows row, row + 1, ..; `row` is a multiple of kRowBlock
    row += first_;
    const int64_t all = rows_ * padded_inputs(k_), scale = all + 4 * row * blocks(k_);
    return {reinterpret_cast<const int8_t*>(memory_) + row * padded_inputs(k_),
            reinterpret_cast<const float*>(memory_ + scale),
            reinterpret_cast<const int32_t*>(memory_ + scale + 4 * rows_ * blocks(k_)),
            static_cast<int>(std::min<int64_t>(kRowBlock, rows_ - row))};
  }

  // Rounds row `row` of a left side, k bfloat16. A block with an infinity or a NaN gets such a scale.
  void put(int64_t row, const bf16* from) const;

 private:
  static int64_t blocks(int64_t k) { return (k + kScaleInputs - 1) / kScaleInputs; }

  char* memory_ = nullptr;
  int64_t rows_ = 0, k_ = 0, first_ = 0;
};

// The scale of a block whose largest size has these bits, and what its inputs are multiplied by before they are rounded.
// Internal linkage, because it is compiled once per instruction set.
static inline float scale_of(uint16_t largest, float& inverse) {
  const float size = to_float(bf16{largest});
  inverse = size > 1e-36f ? 127.0f / size : 0.0f;  // so small that the inverse would not be finite: all zero
  return size * 0.0f + size / 127.0f;              // an infinity becomes a NaN
}

// Rounds `count` <= kScaleInputs inputs of a row, a multiple of 32, to values[i / 64 * step + i % 64].
// Returns the scale; `sum` becomes the sum of the values.
using Round = float (*)(const bf16* from, int64_t count, int8_t* values, int64_t step, int32_t& sum);
float round_avx2(const bf16* from, int64_t count, int8_t* values, int64_t step, int32_t& sum);
float round_avx512(const bf16* from, int64_t count, int8_t* values, int64_t step, int32_t& sum);

// Output o of a group of 16, [k], rounded to bfloat16.
void unpack_int8(const uint8_t* group, int64_t k, int64_t o, float scale, bf16* to);

// c[rows, groups * 16] = a * pack; without the scales of outputs. depth: padded inputs.
using GemmInt8 = void (*)(const Int8Block& a, const uint8_t* pack, int64_t depth, int groups, float* c, int64_t ldc);
void gemm_int8_avx2(const Int8Block& a, const uint8_t* pack, int64_t depth, int groups, float* c, int64_t ldc);
void gemm_int8_avx512(const Int8Block& a, const uint8_t* pack, int64_t depth, int groups, float* c, int64_t ldc);
void gemm_int8_amx(const Int8Block& a, const uint8_t* pack, int64_t depth, int groups, float* c, int64_t ldc);
GemmInt8 gemm_int8_for(int64_t rows);

}  // namespace baton
