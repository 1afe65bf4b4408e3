#include "vector_avx512.h"
#define BATON_PRODUCTS attend_by_products_bf16
#include "attention_products_item.h"
