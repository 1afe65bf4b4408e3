"""A Llama-shaped decoder, dense or a mixture of experts, over FlashInfer's fused operators, for CUDA.

transformers' layers compute norms, rotary embeddings and residuals in small operators: some 120 a layer,
views included. A recorded step does not issue them one by one, but each is a kernel all the same. Here a
layer is four products, attention, rotary embedding, activation and two sums with norms, two norms more where
q and k have them, and two where what is added to the residual has. Attention of recorded steps does those of
q and k itself (AttendsHeads), and a step of one row has nothing but attention and four products a layer
(row_product), unless the model is a Gemma or a Granite. The block of a mixture, router and experts, stays
transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.cuda import triton_kernels
from engine.cuda.layers import FlashInferMLP, fusible_mlp
from engine.cuda.limits import HEAD_DIMS
from engine.cuda.row_product import row_product
from engine.cuda.stored_product import DenseProduct, Products
from engine.decoder_parts import (
    DECODERS,
    INTERLEAVED,
    Rope,
    attention_parts,
    embedding,
    embedding_scale,
    is_mixture,
    layer_mlp,
    layer_norms,
    mlp_outputs,
    norm_eps,
    norm_weight,
    places,
    residual_scale,
    ropes,
)
from engine.device_copies import upload
from engine.families.dense import head_dim
from engine.layer_classes import NORMS_PLUS_ONE
from engine.paged_layers import AttendsHeads, DecoderOutput, HeadInputs, PagedLayers
from engine.parallel.sums import SummedLinear
from engine.positions import longest_context


def fusible(model: Any) -> bool:
    """Whether FlashInferDecoder computes the same as this transformers decoder."""
    config = model.config
    return (
        type(model).__name__ in DECODERS
        and all(is_mixture(mlp) or fusible_mlp(mlp) for mlp in map(layer_mlp, model.layers))
        and head_dim(config) in HEAD_DIMS
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

        self._plus_one = type(model.norm).__name__ in NORMS_PLUS_ONE
        self._interleaved = type(model).__name__ in INTERLEAVED
        self._apply_rope: Any = flashinfer.apply_rope_with_cos_sin_cache_inplace
        self._norm: Any = flashinfer.gemma_rmsnorm if self._plus_one else flashinfer.rmsnorm
        self._add_norm: Any = (
            flashinfer.gemma_fused_add_rmsnorm if self._plus_one else flashinfer.fused_add_rmsnorm
        )
        self.embed_tokens = embedding(model)
        self._embedding_scale, self._residual_scale = embedding_scale(model), residual_scale(model)
        tables = [_rotary_table(rope, longest_context(model.config)) for rope in ropes(model).values()]
        self._layers: list[_Layer] = []
        for i, place in enumerate(places(model)):
            rotary = None if place.rope is None else tables[place.rope]
            self._layers.append(_Layer(model.layers[i], rotary, model.config, products or Products()))
            model.layers[i] = nn.Identity()  # frees the original weights, which are joined now
        self.mlps = nn.ModuleList(layer.mlp for layer in self._layers)
        self.norm = model.norm.weight
        self._norms = [*(layer.input_norm for layer in self._layers), self.norm]
        self._eps = norm_eps(model.norm)
        self._has_rows = (
            triton_kernels.available()
            and self._residual_scale == 1.0
            and all(layer.row is not None for layer in self._layers)
        )

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedLayers, **_: Any
    ) -> DecoderOutput:
        """input_ids, position_ids [1, T] -> last_hidden_state [1, T, hidden], normalised.

        Of tokens that are not read (PagedLayers.reads) it is 0, or has a NaN where a K or V of the last layer
        is not finite.
        """
        residual = self.embed_tokens(input_ids[0])
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        positions = position_ids[0]
        if len(residual) == 1 and self._has_rows:
            return DecoderOutput(self._one_row(residual, positions, paged)[None])
        x = self._norm(residual, self._norms[0], self._eps)
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
        normalised: torch.Tensor = self._norm(residual, self.norm, self._eps)
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
        x = self._summand(layer.projected(attended), layer.out_norm)
        self._add_norm(x, residual, layer.mlp_norm, self._eps)
        x = self._summand(mlp_outputs(self.mlps[number], x), layer.down_norm)
        self._add_norm(x, residual, self._norms[number + 1], self._eps)
        return x

    def _summand(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """What is added to the residual of what attention or an MLP returns, which it may overwrite."""
        if norm is not None:
            x = self._norm(x, norm, self._eps)
        return x if self._residual_scale == 1.0 else x.mul_(self._residual_scale)

    def _attended(
        self, number: int, layer: _Layer, qkv: torch.Tensor, positions: torch.Tensor, paged: PagedLayers
    ) -> torch.Tensor:
        """Attention of one layer: [T, query heads * head_dim]."""
        dim = layer.head_dim
        q, k, v = torch.split(qkv, layer.widths, dim=-1)
        out = torch.empty(len(q), layer.widths[0] // dim, dim, dtype=qkv.dtype, device=qkv.device)
        backend, place = paged.of_layer[number]
        if isinstance(backend, AttendsHeads) and layer.is_rotated_whole and not self._interleaved:
            inputs = HeadInputs(layer.q_gain, layer.k_gain, self._eps, layer.rotary, positions)
            backend.attend(place, _heads(q, dim), _heads(k, dim), _heads(v, dim), out, inputs, layer.sinks)
            return out.flatten(1)
        if layer.q_norm is not None:
            q, k = self._normed_heads(q, layer.q_norm, dim), self._normed_heads(k, layer.k_norm, dim)
        if layer.rotary is not None:
            self._apply_rope(positions, q, k, dim, layer.rotary, is_neox=not self._interleaved)
        backend.forward(place, _heads(q, dim), _heads(k, dim), _heads(v, dim), out, layer.sinks)
        return out.flatten(1)

    def _normed_heads(self, packed: torch.Tensor, norm: torch.Tensor | None, dim: int) -> torch.Tensor:
        """[T, heads * dim], each head after its norm. May be `packed`, which is overwritten."""
        if self._plus_one:  # Gemma's operator takes rows alone
            normed: torch.Tensor = self._norm(packed.reshape(-1, dim), norm, self._eps)
            return normed.view(packed.shape)
        heads = _heads(packed, dim)
        self._norm(heads, norm, self._eps, out=heads)
        return packed


def _heads(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """A view [T, heads, dim]."""
    return packed.view(len(packed), -1, dim)


class _RowWeights(NamedTuple):
    """What a step of one row multiplies with, if it is in the model's dtype."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class _Layer:
    """The weights of one layer, and the products with them."""

    def __init__(self, layer: Any, rotary: torch.Tensor | None, config: Any, products: Products) -> None:
        attention, norms = layer.self_attn, layer_norms(layer)
        parts = attention_parts(attention)
        self.head_dim = head_dim(config)
        self.rotary = rotary
        self.widths = [len(weight) for weight in parts.qkv]
        self.qkv = products.of(_joined(parts.qkv))
        self.qkv_bias = None if parts.qkv_bias is None else _joined(parts.qkv_bias)
        self.out, self.out_bias = products.of(attention.o_proj.weight), attention.o_proj.bias
        self._summed = attention.o_proj if isinstance(attention.o_proj, SummedLinear) else None
        self.sinks = parts.sinks
        mlp = layer_mlp(layer)
        self.mlp: nn.Module = mlp if is_mixture(mlp) else FlashInferMLP(mlp, products)
        self.input_norm, self.mlp_norm = norms.before_attention.weight, norms.before_mlp.weight
        self.out_norm, self.down_norm = _weight(norms.after_attention), _weight(norms.after_mlp)
        self.q_norm, self.k_norm = _weight(parts.q_norm), _weight(parts.k_norm)
        self.q_gain, self.k_gain = _gain(parts.q_norm), _gain(parts.k_norm)
        plain = type(norms.before_mlp).__name__ not in NORMS_PLUS_ONE and self.out_norm is None
        self.row = self._row_weights() if plain else None

    @property
    def is_rotated_whole(self) -> bool:
        """Whether all values of its heads are rotated, or none."""
        return self.rotary is None or self.rotary.shape[1] == self.head_dim

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


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach() for part in parts])


def _weight(norm: Any) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _gain(norm: Any) -> torch.Tensor | None:
    """By what a norm multiplies, for kernels of ours."""
    if norm is None or type(norm).__name__ not in NORMS_PLUS_ONE:
        return _weight(norm)
    return norm_weight(norm)  # float32: the weight plus one is not rounded


def _rotary_table(rope: Rope, positions: int) -> torch.Tensor:
    """float32 [positions, rotated values of a head]: cosines, then sines, of each position."""
    frequencies = rope.frequencies
    steps = torch.arange(positions, dtype=torch.float32, device=frequencies.device)
    angles = steps[:, None] * frequencies
    table: torch.Tensor = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.scale
    return table
