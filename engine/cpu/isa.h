// The instruction set that this process uses: the best one of this CPU, unless BATON_CPU_ISA names another.
#pragma once

namespace baton {

// kAvx512: with VNNI and VL/BW/DQ; kBf16: and AVX512-BF16; kAmx: and AMX with BF16 and INT8.
enum Isa : int { kBase = 0, kAvx2 = 1, kAvx512 = 2, kBf16 = 3, kAmx = 4 };

Isa detected_isa();        // of this CPU and operating system
Isa current_isa();         // at most detected_isa()
void set_isa(Isa limit);   // use no more than this from now on

}  // namespace baton
