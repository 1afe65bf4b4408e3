#include "vector_avx2.h"
#define BATON_DECODER decoder_avx2
#include "decoder_item.h"
