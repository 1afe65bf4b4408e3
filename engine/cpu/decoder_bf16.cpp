#include "vector_avx512.h"
#define BATON_DECODER decoder_bf16
#include "decoder_item.h"
