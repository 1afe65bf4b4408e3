// The entry points of RMSNorm.
#include "norm.h"

#include "isa.h"

#if defined(__x86_64__)

extern "C" {

int baton_norm_call_bytes() { return sizeof(baton::norm::Call); }

void baton_norm(const baton::norm::Call* call) {
  const bool wide = baton::current_isa() >= baton::kAvx512;
  (wide ? baton::norm::norm_avx512 : baton::norm::norm_avx2)(*call);
}
}

#endif
