#include "vector_avx2.h"
#define BATON_PRODUCTS attend_by_products_avx2
#include "attention_products_item.h"
