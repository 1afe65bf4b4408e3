// The entry points of a gated delta net.
#include "delta_net.h"

#include "isa.h"

#if defined(__x86_64__)

extern "C" {

int baton_delta_net_call_bytes() { return sizeof(baton::delta_net::Call); }

void baton_delta_net(const baton::delta_net::Call* call) {
  const bool wide = baton::current_isa() >= baton::kAvx512;
  (wide ? baton::delta_net::delta_net_avx512 : baton::delta_net::delta_net_avx2)(*call);
}
}

#endif
