#define BATON_GEMM_EXPANDED gemm_expanded_avx512
#include "linear_expanded_avx512.h"
