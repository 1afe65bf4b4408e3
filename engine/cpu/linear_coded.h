// Products with packs of bfloat16 in 12.25 bits a weight, without loss: few rows wait for the weights, and read 0.77 of the bytes.
//
// The lower byte of a weight, the last bit of its exponent and the mantissa, is noise. The upper one, sign and exponent, is nearly
// always one of 16 in a layer. A block of 128 inputs and 16 outputs holds the 16 upper bytes that it has most often, a code of
// 4 bits for each weight, and the lower bytes as they are:
//   [16] upper bytes; [12] patches; [16] steps of four lines (linear.h): [64] pairs of codes, [2][64] lower bytes
// Lower bytes are of two lines, 8 numbers of each in turns, so that unpacking joins them with upper bytes. Codes are in the same
// places, the first two lines' in the lower halves of bytes. A patch is a weight whose upper byte has no code; a matrix with more of
// these than a block has room for cannot be packed so. The last block of a group is filled up with zeros.
//
// With AVX-512 and without AMX, up to kCodedRows rows multiply lines in the registers in which they are decoded, and leave them in
// memory for further rows, which multiply them as those of a pack of bfloat16. Elsewhere all lines of a unit are decoded first.
#pragma once
#include "linear_expanded.h"

namespace baton {

constexpr int kCodedRows = 8;
constexpr int kCodedHeader = 64, kCodedStep = 192;  // bytes
constexpr int kStepInputs = 8;
constexpr int64_t kCodedBlockBytes = kCodedHeader + kBlockInputs / kStepInputs * kCodedStep;

struct Patches {
  static constexpr int kMost = 11;
  static constexpr uint16_t kNone = 0xffff;
  struct Patch {
    uint16_t place = kNone;  // among the numbers of the block's lines
    uint16_t bits = 0;

    int input() const { return place / (2 * 16) * 2 + place % 2; }  // of the block
    int output() const { return place % (2 * 16) / 2; }
  } patches[kMost + 1];  // those that are used come first, and the last one is not

  static const Patches& of(const uint8_t* block) { return *reinterpret_cast<const Patches*>(block + 16); }
  bool any() const { return patches[0].place != kNone; }

  bool add(uint16_t place, uint16_t bits) {  // whether there was room
    int used = 0;
    while (patches[used].place != kNone) ++used;
    if (used == kMost) return false;
    patches[used] = {place, bits};
    return true;
  }

  void apply(bf16* lines) const {
    for (const Patch* patch = patches; patch->place != kNone; ++patch) lines[patch->place].bits = patch->bits;
  }
};
static_assert(16 + sizeof(Patches) == kCodedHeader);

// What the codes and lower bytes of patches stand for: code 0 and 0.
inline bf16 patched_number(const uint8_t* block) { return {static_cast<uint16_t>(block[0] << 8)}; }

struct Input;
struct Weights;

// c[m, groups * 16] = a[m, k] * groups of a pack, 1 <= m <= kCodedRows. The lines go to `kept`, too, unless that is null; then m is
// kCodedRows.
using GemmCoded = void (*)(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c, int64_t ldc,
                           bf16* kept);
void gemm_coded_avx512(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c, int64_t ldc,
                       bf16* kept);
void gemm_coded_bf16(const Input& a, int64_t m, const Weights& weights, int64_t k, int groups, float* c, int64_t ldc,
                     bf16* kept);
GemmCoded gemm_coded_for();  // of current_isa(); null if it has none

// Decodes the first k inputs of a group to its lines.
using DecodeGroup = void (*)(const uint8_t* group, int64_t k, bf16* lines);
void decode_group_avx2(const uint8_t* group, int64_t k, bf16* lines);
void decode_group_avx512(const uint8_t* group, int64_t k, bf16* lines);

bf16* line_memory(int64_t count);  // of this thread, aligned to 64, valid until the next call
// The lines of a unit, in line_memory().
const bf16* decoded(const Weights& weights, int64_t k, int groups);

// Copies output `o` of a group, [k].
void unpack_coded(const uint8_t* group, int64_t k, int64_t o, bf16* to);

}  // namespace baton
