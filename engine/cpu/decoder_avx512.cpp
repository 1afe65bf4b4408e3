#include "vector_avx512.h"
#define BATON_DECODER decoder_avx512
#include "decoder_item.h"
