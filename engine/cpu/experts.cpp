// The entry points of a mixture of experts.
#include "experts.h"

#include "isa.h"

#if defined(__x86_64__)

extern "C" {

int baton_experts_call_bytes() { return sizeof(baton::experts::Call); }

void baton_experts(const baton::experts::Call* call) {
  const bool wide = baton::current_isa() >= baton::kAvx512;
  (wide ? baton::experts::experts_avx512 : baton::experts::experts_avx2)(*call);
}
}

#endif
