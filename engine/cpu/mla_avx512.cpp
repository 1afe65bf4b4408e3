#define BATON_KERNELS mla_avx512
#include "mla_item.h"
