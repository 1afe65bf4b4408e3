#define BATON_GEMM_CODED gemm_coded_bf16
#include "linear_coded_avx512.h"
