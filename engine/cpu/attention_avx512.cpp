#define BATON_KERNELS attention_avx512
#include "attention_item.h"
