#include "vector_avx2.h"
#define BATON_EXPERTS experts_avx2
#include "experts_item.h"
