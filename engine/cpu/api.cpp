// Small C entry points; the larger ones are beside what they call.
#include "attention.h"
#include "isa.h"

extern "C" {

int baton_detected_isa() { return baton::detected_isa(); }
int baton_current_isa() { return baton::current_isa(); }
void baton_set_isa(int isa) { baton::set_isa(static_cast<baton::Isa>(isa)); }

// The caller's mirror of the struct must have this size.
int baton_attention_call_bytes() { return sizeof(baton::AttentionCall); }
}
