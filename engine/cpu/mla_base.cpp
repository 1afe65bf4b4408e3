#define BATON_KERNELS mla_base
#include "mla_item.h"
