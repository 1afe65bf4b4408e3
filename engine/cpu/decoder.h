// The arguments of a whole decoder forward in one call. Plain C structs, mirrored by ctypes in decoder.py.
#pragma once
#include <cstdint>

#include "attention.h"
#include "linear.h"
#include "numeric.h"

namespace baton {

struct LayerWeights {
  Weights qkv;      // q, k and v are one pack; q alone, if the layer shares another's keys and values
  Weights out;
  Weights gate_up;  // groups of 16 gate and 16 up outputs alternate. Without a pack: the MLP is computed outside
  Weights down;
  Weights input_gate;  // of DecoderCall::layer_inputs: from hidden states to their width. Without a pack: the layer has none
  Weights input_out;   // and from there to what is added to the residual
  const float* input_norm;  // [hidden]
  const float* mlp_norm;    // or null, if the MLP is computed outside
  const float* out_norm;  // [hidden] of what attention adds to the residual, or null. All layers have both, or none
  const float* down_norm;  // [hidden] of what the MLP adds
  const float* input_out_norm;  // [hidden] of what the layer's inputs add
  const float* q_norm;  // [head_dim], or null
  const float* k_norm;
  const float* v_norm;
  const float* qkv_bias;  // [(heads + 2 kv_heads) * head_dim], or null
  const float* out_bias;  // [hidden], or null
  const float* sinks;     // [heads]: AttentionCall::sinks, or null
  int32_t group;  // of DecoderCall::groups
  int32_t place;  // among the layers of its group
  int32_t rope;   // which table of cosines and sines; < 0: q and k are not rotated
  int32_t shares;  // whether it reads the keys and values of an earlier layer, which has its group and place
  int32_t intermediate;  // of an MLP that is computed here
  float scale;    // of the residual after the layer
};

// The layers that attend to the same tokens, with heads of one number and width, and their pages.
struct LayerGroup {
  const AttentionCall* attention;  // batch and shapes; the decoder sets the tensors in its own copy. Null: no layer that is
                                   // computed is of this group
  int64_t layer_bytes;  // from one layer's tiles to the next
  int64_t v_bytes;      // from K's to V's tiles
  char* tiles;          // K tile of page 0, layer 0, head 0
};
constexpr int kGroups = 2;  // layers that see all tokens, and layers with a window

enum Activation : int32_t { kSilu, kGeluTanh };

// A layer's MLP that is computed outside, as a mixture of experts is.
struct OutsideMlp {
  bf16* inputs;         // [rows, hidden] to fill: hidden states after the layer's norm if there is one
  const bf16* outputs;  // [rows, hidden]: what is added to the residual, after its norm if there is one
  int64_t rows;         // to set: all tokens, or those that are read
};

// Parts of a step whose time can be counted. The time of a norm that every thread computes for itself is counted in the
// part that follows.
enum Part { kQkv, kRope, kAttention, kOut, kGateUp, kDown, kNorm, kParts };

struct DecoderCall {
  const LayerWeights* layers;
  const float* final_norm;  // [hidden]
  float* residual;          // [tokens, hidden]: in, the embeddings; out, undefined
  bf16* result;             // [tokens, hidden]: normed hidden states; of rows that are not read, 0, or NaN if their K or
                            // V in the last layer, or what goes into the first one that shares them, is not finite
  const float* cos;         // [ropes, tokens, rotary / 2], of narrower heads the first ones
  const float* sin;
  char* scratch;            // baton_decoder_scratch_bytes() bytes, aligned to 64
  LayerGroup groups[kGroups];
  const bf16* layer_inputs;    // [tokens, layer_count, layer_input_width]: what each layer adds for a token; null: nothing
  OutsideMlp mlp;              // room for the inputs of all tokens, if there is such a layer
  const int64_t* reads;       // [read_count] the rows whose hidden states are read, ascending
  const int64_t* read_starts; // [seqs + 1] sequence s's are reads[read_starts[s]] ..., its last new tokens or none
  int64_t read_count;
  int64_t tokens;
  int32_t layer_count;
  int32_t tail;        // the first layer that rows which are read go through alone, but for its K and V: the last one, or the
                       // first of those at the end that share. Layers that share have no MLP that is computed outside
  int32_t hidden;
  int32_t layer_input_width;
  int32_t ropes;       // tables of cosines and sines
  int32_t rotary;      // values of a head that are rotated, the first ones: all, if it has fewer
  int32_t interleaved;  // whether they are rotated in pairs of neighbours, not of halves
  int32_t activation;  // of the gates: baton::Activation
  float residual_scale;  // of what attention and MLPs add to the residual
  float eps;
  double* part_seconds;  // [kParts] to add to, or null
};

struct DecoderKernels {
  int64_t (*scratch_bytes)(const DecoderCall& call);
  // From the MLP after layer `computed`, or from the first layer if it is -1, to the next MLP that is computed outside.
  // Returns its layer, or layer_count when the result is there. The memory of the call is not touched in between.
  int (*run)(DecoderCall& call, int computed);
};
extern const DecoderKernels decoder_avx2;
extern const DecoderKernels decoder_avx512;
extern const DecoderKernels decoder_bf16;  // its products use AMX if the machine has it

}  // namespace baton
