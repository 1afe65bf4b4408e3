#include "vector_avx512.h"
#define BATON_MAMBA2 mamba2_avx512
#include "mamba2_item.h"
