#define BATON_KERNELS mla_avx2
#include "mla_item.h"
