// The entry points of the fused decoder.
#include "decoder.h"

#include "isa.h"

#if defined(__x86_64__)

namespace {

const baton::DecoderKernels& kernels() {
  if (baton::current_isa() >= baton::kBf16) return baton::decoder_bf16;
  return baton::current_isa() >= baton::kAvx512 ? baton::decoder_avx512 : baton::decoder_avx2;
}

}  // namespace

extern "C" {

int baton_decoder_call_bytes() { return sizeof(baton::DecoderCall); }
int baton_layer_weights_bytes() { return sizeof(baton::LayerWeights); }

int64_t baton_decoder_scratch_bytes(const baton::DecoderCall* call) { return kernels().scratch_bytes(*call); }

int baton_decoder(baton::DecoderCall* call, int computed) { return kernels().run(*call, computed); }
}

#endif
