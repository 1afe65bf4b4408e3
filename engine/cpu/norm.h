// RMSNorm of rows of bfloat16. A plain C struct, mirrored by a ctypes.Structure in norm.py.
#pragma once
#include <cstdint>

#include "numeric.h"
#include "pool.h"

namespace baton::norm {

struct Call {
  const bf16* x;  // [rows, width]
  bf16* out;      // the same, contiguous
  int64_t rows;
  int64_t stride;       // elements of x from one row to the next
  const float* weight;  // [width], or null
  int32_t width;        // a multiple of 16
  float eps;
  int32_t threads;
};

using Run = void (*)(const Call& call);
#if defined(__x86_64__)
extern const Run norm_avx2;
extern const Run norm_avx512;
#endif

}  // namespace baton::norm
