#define BATON_KERNELS attention_bf16
#include "attention_item.h"
