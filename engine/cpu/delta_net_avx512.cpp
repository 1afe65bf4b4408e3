#include "vector_avx512.h"
#define BATON_DELTA_NET delta_net_avx512
#include "delta_net_item.h"
