"""A Llama-shaped decoder, dense or a mixture of experts, over FlashInfer's fused operators, for CUDA.

transformers' layers compute norms, rotary embeddings and residuals in small operators: some 120 a layer,
views included. A recorded step does not issue them one by one, but each is a kernel all the same. Here a
layer is four products, attention, rotary embedding, activation and two sums with norms, and two norms more
where q and k have them. Attention of recorded steps does those of q and k itself (AttendsHeads), and a step
of one row has nothing but attention and four products a layer (row_product). The block of a mixture, router
and experts, stays transformers'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from engine.cuda import triton_kernels
from engine.cuda.layers import FlashInferMLP, fusible_mlp
from engine.cuda.limits import HEAD_DIMS
from engine.cuda.row_product import row_product
from engine.cuda.stored_experts import StoredExperts
from engine.cuda.stored_product import DenseProduct, Products
from engine.device_copies import upload
from engine.paged_layers import AttendsHeads, DecoderOutput, HeadInputs, PagedLayers
from engine.parallel.sums import SummedExperts, SummedLinear
from engine.positions import longest_context

MODELS = (
    *("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SeedOssModel"),
    *("MixtralModel", "Qwen2MoeModel", "Qwen3MoeModel"),
)
"""The transformers classes that FlashInferDecoder computes."""


def fusible(model: Any) -> bool:
    """Whether FlashInferDecoder computes the same as this transformers decoder."""
    config = model.config
    return (
        type(model).__name__ in MODELS
        and all(hasattr(layer.mlp, "experts") or fusible_mlp(layer.mlp) for layer in model.layers)
        and _head_dim(config) in HEAD_DIMS
    )


class FlashInferDecoder(nn.Module):
    """Replaces a `fusible` model. Keeps its embedding, and its weights, those of one input joined.

    FlashInfer's rotary cosines and sines, norms and sums are float32 inside, where transformers rounds
    between them: its results differ from transformers' by no more than transformers' own rounding.
    """

    def __init__(self, model: Any, products: Products | None = None) -> None:
        """Raises ImportError if FlashInfer is not installed."""
        super().__init__()
        import flashinfer

        self._ops: Any = flashinfer
        self.embed_tokens = model.embed_tokens
        self._layers: list[_Layer] = []
        for i in range(len(model.layers)):
            self._layers.append(_Layer(model.layers[i], model.config, products or Products()))
            model.layers[i] = nn.Identity()  # frees the original weights, which are joined now
        self.mlps = nn.ModuleList(layer.mlp for layer in self._layers)
        self.norm = model.norm.weight
        self._norms = [*(layer.input_norm for layer in self._layers), self.norm]
        self._eps = float(model.norm.variance_epsilon)
        self._rotary = _rotary_table(model)
        self._has_rows = triton_kernels.available() and all(layer.row is not None for layer in self._layers)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedLayers, **_: Any
    ) -> DecoderOutput:
        """input_ids, position_ids [1, T] -> last_hidden_state [1, T, hidden], normalised.

        Of tokens that are not read (PagedLayers.reads) it is 0, or has a NaN where a K or V of the last layer
        is not finite.
        """
        residual, positions = self.embed_tokens(input_ids[0]), position_ids[0]
        if len(residual) == 1 and self._has_rows:
            return DecoderOutput(self._one_row(residual, positions, paged)[None])
        x = self._ops.rmsnorm(residual, self._norms[0], self._eps)
        last = len(self._layers) - 1
        for number in range(last):
            attended = self._attend(number, x, positions, paged)[0]
            x = self._rest_of_layer(number, attended, residual)
        attended, kv = self._attend(last, x, positions, paged)
        if paged.reads is None:
            del kv  # the layers before had its memory, too
            return DecoderOutput(self._rest_of_layer(last, attended, residual)[None])
        hidden = torch.zeros_like(residual)
        hidden[:, 0] = kv.sum(-1, dtype=torch.float32) * 0
        reads = upload(paged.reads.rows, hidden.device)
        if len(reads):
            hidden[reads] = self._rest_of_layer(last, attended[reads], residual[reads])
        return DecoderOutput(hidden[None])

    def _one_row(self, residual: torch.Tensor, positions: torch.Tensor, paged: PagedLayers) -> torch.Tensor:
        """The same of one token [1, hidden], in five kernels a layer."""
        for number, layer in enumerate(self._layers):
            assert layer.row is not None, "see _has_rows"
            qkv, out, gate_up, down = layer.row
            heads = residual.new_empty(1, len(qkv))
            row_product(residual, layer.input_norm, qkv, layer.qkv_bias, heads, False, False, self._eps)
            attended = self._attended(number, layer, heads, positions, paged)
            row_product(attended, None, out, layer.out_bias, residual, False, True, self._eps)
            middle = residual.new_empty(1, len(gate_up) // 2)
            row_product(residual, layer.mlp_norm, gate_up, None, middle, True, False, self._eps)
            row_product(middle, None, down, None, residual, False, True, self._eps)
        normalised: torch.Tensor = self._ops.rmsnorm(residual, self.norm, self._eps)
        return normalised

    def _attend(
        self, number: int, x: torch.Tensor, positions: torch.Tensor, paged: PagedLayers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over x [T, hidden]: [T, query heads * head_dim], and the new K and V as they
        are written, [T, 2 * KV heads * head_dim]."""
        layer = self._layers[number]
        qkv = layer.qkv(x, layer.qkv_bias)
        return self._attended(number, layer, qkv, positions, paged), qkv[:, layer.widths[0] :]

    def _rest_of_layer(self, number: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What follows attention, of any rows. Adds to their residuals, and returns these after the next
        norm."""
        layer = self._layers[number]
        x = layer.projected(attended)
        self._ops.fused_add_rmsnorm(x, residual, layer.mlp_norm, self._eps)
        x = self.mlps[number](x[None])[0]
        self._ops.fused_add_rmsnorm(x, residual, self._norms[number + 1], self._eps)
        normalised: torch.Tensor = x
        return normalised

    def _attended(
        self, number: int, layer: _Layer, qkv: torch.Tensor, positions: torch.Tensor, paged: PagedLayers
    ) -> torch.Tensor:
        """Attention of one layer: [T, query heads * head_dim]."""
        dim = layer.head_dim
        q, k, v = torch.split(qkv, layer.widths, dim=-1)
        q_heads, k_heads, v_heads = (part.view(len(part), -1, dim) for part in (q, k, v))  # views
        out = torch.empty(q_heads.shape, dtype=qkv.dtype, device=qkv.device)
        backend, place = paged.of_layer[number]
        if isinstance(backend, AttendsHeads):
            inputs = HeadInputs(layer.q_norm, layer.k_norm, self._eps, self._rotary, positions)
            backend.attend(place, q_heads, k_heads, v_heads, out, inputs)
            return out.flatten(1)
        if layer.q_norm is not None:
            self._ops.rmsnorm(q_heads, layer.q_norm, self._eps, out=q_heads)
            self._ops.rmsnorm(k_heads, layer.k_norm, self._eps, out=k_heads)
        self._ops.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, self._rotary)
        backend.forward(place, q_heads, k_heads, v_heads, out, None)
        return out.flatten(1)


class _RowWeights(NamedTuple):
    """What a step of one row multiplies with, if it is in the model's dtype."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class _Layer:
    """The weights of one layer, and the products with them."""

    def __init__(self, layer: Any, config: Any, products: Products) -> None:
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_dim = _head_dim(config)
        self.widths = [len(part.weight) for part in parts]
        self.qkv = products.of(_joined([part.weight for part in parts]))
        self.qkv_bias = None if parts[0].bias is None else _joined([part.bias for part in parts])
        self.out, self.out_bias = products.of(attention.o_proj.weight), attention.o_proj.bias
        self._summed = attention.o_proj if isinstance(attention.o_proj, SummedLinear) else None
        self.mlp = _mlp(layer.mlp, products)
        self.input_norm = layer.input_layernorm.weight
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.q_norm = attention.q_norm.weight if hasattr(attention, "q_norm") else None
        self.k_norm = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        self.row = self._row_weights()

    def projected(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention adds to the residual, of all ranks."""
        if self._summed is None:
            return self.out(attended, self.out_bias)
        return self._summed.finished(self.out(attended, None))

    def _row_weights(self) -> _RowWeights | None:
        """The weights, if row_product computes what this layer does. It adds to the residual at once, where
        other ranks would have to add first."""
        if self._summed is not None or not (isinstance(self.mlp, FlashInferMLP) and self.mlp.is_silu):
            return None
        products = (self.qkv, self.out, self.mlp.gate_up, self.mlp.down)
        weights = [product.weight for product in products if isinstance(product, DenseProduct)]
        return _RowWeights(*weights) if len(weights) == len(products) else None


def _mlp(mlp: Any, products: Products) -> nn.Module:
    """A gated MLP in its fused form, or a mixture whose shared expert, if it has one, is such an MLP, and
    whose experts stay stored if they can."""
    if not hasattr(mlp, "experts"):
        return FlashInferMLP(mlp, products)
    if hasattr(mlp, "shared_expert") and fusible_mlp(mlp.shared_expert):
        mlp.shared_expert = FlashInferMLP(mlp.shared_expert, products)
    holder = mlp.experts if isinstance(mlp.experts, SummedExperts) else mlp
    holder.experts = StoredExperts.of(holder.experts, products) or holder.experts
    mixture: nn.Module = mlp
    return mixture


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach() for part in parts])


def _rotary_table(model: Any) -> torch.Tensor:
    """float32 [positions, head_dim]: cosines, then sines, of each position."""
    frequencies = model.rotary_emb.inv_freq.float()
    positions = torch.arange(longest_context(model.config), dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies
    table: torch.Tensor = torch.cat((angles.cos(), angles.sin()), dim=-1) * model.rotary_emb.attention_scaling
    return table
