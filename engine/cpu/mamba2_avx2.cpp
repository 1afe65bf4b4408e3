#include "vector_avx2.h"
#define BATON_MAMBA2 mamba2_avx2
#include "mamba2_item.h"
