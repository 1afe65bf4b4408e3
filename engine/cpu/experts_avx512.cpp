#include "vector_avx512.h"
#define BATON_EXPERTS experts_avx512
#include "experts_item.h"
