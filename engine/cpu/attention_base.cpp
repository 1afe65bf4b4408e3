#define BATON_KERNELS attention_base
#include "attention_item.h"
