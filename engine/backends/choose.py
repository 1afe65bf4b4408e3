"""Chooses the attention backends of a model, once at load."""

from __future__ import annotations

from collections.abc import Mapping

from engine.attention_chunks import AttentionChunks
from engine.backends.block_choose import build_blocks
from engine.backends.compressed_reference import TorchCompressedAttention
from engine.backends.compressed_triton import TritonCompressedAttention, check_entries
from engine.backends.flashinfer_limits import check_heads
from engine.backends.latent_choose import build_latent
from engine.backends.pick import BackendUnavailable, pick
from engine.backends.torch_reference import TorchAttention
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.loader import LoadedModel
from engine.paged_layers import AttentionBackend, CompressedBackend, LatentBackend, PagedLayers
from kvcache.indexed_pool import IndexedKVCache
from kvcache.pool import EntryKVCache, KVCache, MHAKVCache, MLAKVCache


def build_layers(config: EngineConfig, loaded: LoadedModel, pools: Mapping[str, KVCache]) -> PagedLayers:
    """Build a backend for each group that attends. Raises ConfigError like build_attention."""
    built: dict[str, AttentionBackend] = {}
    tail: dict[str, AttentionBackend] = {}
    latent: LatentBackend | None = None
    compressed: CompressedBackend | None = None
    for group in loaded.spec.groups:
        pool = pools[group.name]
        if isinstance(pool, MLAKVCache):
            latent = build_latent(config, pool, loaded.attention)
        if isinstance(pool, EntryKVCache) and group.window is None:
            compressed = build_compressed(config, pool, pools["window"], loaded)
        if isinstance(pool, MHAKVCache) and group.layer_ids:
            layers = [facts for facts in loaded.attention if facts.kv_layer in group.layer_ids]
            scales, heads = {facts.scale for facts in layers}, {facts.query_heads for facts in layers}
            if len(scales) != 1 or len(heads) != 1:
                raise UnsupportedModel(
                    f"its {group.kind} layers differ in scale ({scales}) or in query heads ({heads})",
                    "use another model",
                )
            sinks, softcap = any(facts.sinks for facts in layers), layers[0].softcap
            assert all(facts.softcap == softcap for facts in layers), (
                "a config has one attn_logit_softcapping"
            )
            like = heads.pop(), scales.pop(), sinks, softcap
            choices = {facts.blocks for facts in layers if facts.blocks is not None}
            if isinstance(pool, IndexedKVCache) and choices:
                [choice] = choices  # a config has one
                built[group.kind] = build_blocks(config, pool, *like[:2], choice)
                continue
            built[group.kind] = build_attention(config, pool, *like)
            if any(facts.shares is not None for facts in layers):
                tail[group.kind] = build_attention(config, pool, *like, beside=built[group.kind])
    return layers_over(loaded, pools, built, latent, tail, compressed)


def layers_over(
    loaded: LoadedModel,
    pools: Mapping[str, KVCache],
    built: Mapping[str, AttentionBackend],
    latent: LatentBackend | None,
    tail: Mapping[str, AttentionBackend],
    compressed: CompressedBackend | None = None,
) -> PagedLayers:
    """The layers of a model over backends by the kind of their group; `tail`: of those that share keys and
    values. Raises ConfigError if pages do not divide chunked attention."""
    groups, shared = loaded.spec.groups, loaded.shared
    sizes = [facts.window for facts in loaded.attention if facts.in_chunks and facts.window is not None]
    chunks = AttentionChunks(sizes[0], pools["window"].page_size) if sizes else None
    last = PagedLayers(tail.get("full"), tail.get("window"), groups, shared=shared) if tail else None
    return PagedLayers(
        built.get("full"), built.get("window"), groups, latent, compressed, shared, last, chunks
    )


def build_compressed(
    config: EngineConfig, entries: EntryKVCache, window: KVCache, loaded: LoadedModel
) -> CompressedBackend:
    """The backend that `config.attention` names. On CPUs there is plain torch alone."""
    assert isinstance(window, EntryKVCache)
    [scale] = {facts.scale for facts in loaded.attention}
    compressions = {facts.compression for facts in loaded.attention if facts.compression is not None}

    def cpu() -> CompressedBackend:
        raise BackendUnavailable("there is no kernel of compressed attention")

    def triton() -> CompressedBackend:
        indexed = next((one.tokens for one in compressions if one.top is not None), None)
        check_entries(entries, loaded.model.config.head_dim, indexed)
        return TritonCompressedAttention(entries, window, scale, compressions)

    return pick(config, lambda: TorchCompressedAttention(entries, window, scale, compressions), cpu, triton)


def build_attention(
    config: EngineConfig,
    pool: MHAKVCache,
    query_heads: int,
    scale: float,
    sinks: bool = False,
    softcap: float | None = None,
    beside: AttentionBackend | None = None,
) -> AttentionBackend:
    """The backend that `config.attention` names. "auto" takes the fastest one that the device has.

    `sinks` says whether the layers have attention sinks. With a softcap a score s becomes softcap tanh(s /
    softcap). If the backend cannot run, "auto" takes plain torch and logs the reason; for a backend given by
    name, ConfigError is raised. `beside`: another one that runs before or after it, and whose working memory
    it may use.
    """

    def cpu() -> AttentionBackend:
        from engine.cpu.attention import CpuAttention

        return CpuAttention(pool, query_heads, scale, softcap)

    def flashinfer() -> AttentionBackend:
        from engine.backends.flashinfer import FlashInferAttention

        check_heads(pool, sinks)
        workspace = beside.workspace if isinstance(beside, FlashInferAttention) else None
        return FlashInferAttention(pool, query_heads, scale, sinks, softcap, workspace)

    return pick(config, lambda: TorchAttention(pool, query_heads, scale, softcap), cpu, flashinfer)
