#include "isa.h"

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {
namespace {

#if defined(__x86_64__)
// Whether the CPU has AMX with BF16 and INT8, and the kernel permits this process to use tile data. The permission is requested once;
// threads inherit it.
bool amx_allowed() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d & (1u << 24), amx_bf16 = d & (1u << 22), amx_int8 = d & (1u << 25);
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return tile && amx_bf16 && amx_int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Isa detect() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kBase;
  const bool avx512 = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return kAvx512;
  return amx_allowed() ? kAmx : kBf16;
#else
  return kBase;
#endif
}

Isa limit = kAmx;

}  // namespace

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa current_isa() { return std::min(limit, detected_isa()); }

void set_isa(Isa wanted) { limit = wanted; }

}  // namespace baton
