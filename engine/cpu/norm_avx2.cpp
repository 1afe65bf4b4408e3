#include "vector_avx2.h"
#define BATON_NORM norm_avx2
#include "norm_item.h"
