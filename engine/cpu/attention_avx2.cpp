#define BATON_KERNELS attention_avx2
#include "attention_item.h"
