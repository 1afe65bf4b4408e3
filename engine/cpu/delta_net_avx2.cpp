#include "vector_avx2.h"
#define BATON_DELTA_NET delta_net_avx2
#include "delta_net_item.h"
