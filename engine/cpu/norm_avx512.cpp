#include "vector_avx512.h"
#define BATON_NORM norm_avx512
#include "norm_item.h"
