// The entry points of a Mamba-2 layer.
#include "mamba2.h"

#include "isa.h"

#if defined(__x86_64__)

extern "C" {

int baton_mamba2_call_bytes() { return sizeof(baton::mamba2::Call); }

void baton_mamba2(const baton::mamba2::Call* call) {
  const bool wide = baton::current_isa() >= baton::kAvx512;
  (wide ? baton::mamba2::mamba2_avx512 : baton::mamba2::mamba2_avx2)(*call);
}
}

#endif
