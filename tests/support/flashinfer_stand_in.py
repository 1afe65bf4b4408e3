"""FlashInfer's wrappers by their documentation: attention of one query and one head at a time.

Each call is bound to FlashInfer's own signature. What the stand-ins check besides is what FlashInfer does not
say when it is wrong: it waits for the device (offsets given there, pageable memory), or reads what the next
plan changes. Under FakeTensorMode `run` computes nothing but touches what the kernel does.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from engine.backends.block_flashinfer import FlashInferBlockAttention
from engine.backends.choose import layers_over
from engine.backends.compressed_triton import TritonCompressedAttention
from engine.backends.flashinfer import FlashInferAttention
from engine.backends.latent_flashinfer import FlashInferLatentAttention
from engine.backends.sparse_flashinfer import FlashInferSparseAttention
from engine.config import EngineConfig
from engine.loader import LoadedModel, load_model
from engine.paged_layers import PagedLayers
from engine.runner import ModelRunner
from kvcache.indexed_pool import IndexedKVCache
from kvcache.pool import EntryKVCache
from tests.support.driver import pools_of
from tests.support.flashinfer_record import function_signature, signature

Bound = dict[str, Any]


class _StandIn:
    """What the wrappers have in common: fixed buffers in graph mode, plan before run."""

    name: ClassVar[str]
    buffers: ClassVar[dict[str, str]]  # argument of plan -> argument of __init__
    on_device: ClassVar[str]  # the one argument of plan that is read there: page ids

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("__init__", args, kwargs)
        workspace = given["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8
        assert given.get("backend") == "fa2", "auto may take a kernel that refuses pages with a stride"
        self.device = workspace.device
        self.fixed: dict[str, torch.Tensor] | None = None
        if given.get("use_cuda_graph"):
            self.fixed = {arg: given[buffer] for arg, buffer in self.buffers.items()}
            for buffer in self.fixed.values():
                assert (buffer.dtype, buffer.device) == (torch.int32, self.device)
        self.planned: Bound | None = None
        self.read: dict[str, torch.Tensor] = {}  # what run() reads on the device

    def _bind(self, method: str, args: tuple[Any, ...], kwargs: Bound) -> Bound:
        return dict(signature(self.name, method).bind(*args, **kwargs).arguments)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        assert not (self.device.type == "cuda" and capturing()), "plan() inside a graph"
        given = self._bind("plan", args, kwargs)
        assert given["causal"]
        for arg in (*self.buffers, "seq_lens"):
            if arg not in given:
                continue
            assert given[arg].dtype == torch.int32, arg
            if arg == self.on_device:
                assert given[arg].device == self.device, f"{arg} is copied again, and the host waits"
            else:
                assert given[arg].device.type == "cpu", f"plan() waits for the device to read {arg}"
        if self.fixed is None:
            self.read = {arg: given[arg].to(self.device, non_blocking=True) for arg in self.buffers}
        else:
            self.read = self.fixed
            for arg, buffer in self.fixed.items():
                if arg == self.on_device:
                    assert len(given[arg]) <= len(buffer)
                    buffer[: len(given[arg])].copy_(given[arg], non_blocking=True)
                else:
                    assert len(given[arg]) == len(buffer), "the batch size of a graph is fixed"
                    buffer.copy_(given[arg], non_blocking=True)
        self.planned = given

    def _lists(self) -> list[list[int]]:
        return [self.read[arg].tolist() for arg in self.buffers]


class StandInPrefill(_StandIn):
    name = "BatchPrefillWithPagedKVCacheWrapper"
    on_device = "paged_kv_indices"
    buffers: ClassVar = {
        "qo_indptr": "qo_indptr_buf",
        "paged_kv_indptr": "paged_kv_indptr_buf",
        "paged_kv_indices": "paged_kv_indices_buf",
        "paged_kv_last_page_len": "paged_kv_last_page_len_buf",
    }

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        assert self.planned is not None
        if not isinstance(self.read["qo_indptr"], FakeTensor):
            pages = self.planned["paged_kv_indptr"].diff()
            whole = (pages - 1) * self.planned["page_size"] + self.planned["paged_kv_last_page_len"]
            assert self.planned["seq_lens"].equal(whole)

    def run(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("run", args, kwargs)
        self.attend(given["q"], given["paged_kv_cache"], given["out"], None)

    def attend(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        plan = self.planned
        assert plan is not None, "run() before plan()"
        assert q.is_contiguous()
        assert (q.dtype, kv[0].dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert q.shape[1:] == (plan["num_qo_heads"], plan["head_dim_qk"])
        if isinstance(q, FakeTensor):
            _touch(out, q, *kv, *self.read.values(), *([] if sinks is None else [sinks]))
            return
        q_starts, kv_starts, pages, last = self._lists()
        group, page_size = plan["num_qo_heads"] // plan["num_kv_heads"], plan["page_size"]
        cap = plan.get("logits_soft_cap") or torch.inf
        column = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
        for i, last_len in enumerate(last):
            of_sequence = pages[kv_starts[i] : kv_starts[i + 1]]
            length = (len(of_sequence) - 1) * page_size + last_len
            k, v = (side[of_sequence].transpose(1, 2).flatten(0, 1)[:length] for side in kv)
            k, v = (side.repeat_interleave(group, dim=1).float() for side in (k, v))  # [length, heads, D]
            start, end = q_starts[i], q_starts[i + 1]
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * plan["sm_scale"]
            if cap < torch.inf:
                scores = cap * torch.tanh(scores / cap)
            places = torch.arange(length)
            behind = places[length - (end - start) :, None] - places  # of a query, a key
            left = plan["window_left"]
            scores = scores.masked_fill((behind < 0) | ((behind > left) & (left >= 0)), -torch.inf)
            joined = torch.cat((scores, column[:, None, None].expand(-1, end - start, 1)), dim=-1)
            values = torch.einsum("hqk,khd->qhd", joined.softmax(-1)[..., :-1], v)
            out[start:end] = values.to(out.dtype)


class StandInSinks(StandInPrefill):
    """The variant for attention sinks, which is told at once what it will be planned for."""

    name = "BatchAttentionWithAttentionSinkWrapper"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.promised = self._bind("__init__", args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        assert self.planned is not None
        assert self.promised["head_dim_qk"] == self.promised["head_dim_vo"]
        for arg in ("head_dim_qk", "window_left", "q_data_type", "kv_data_type"):
            assert self.promised[arg] == self.planned[arg], arg

    def run(self, *args: Any, **kwargs: Any) -> None:
        given = self._bind("run", args, kwargs)
        sink, scale = given["args"]
        assert sink.dtype == torch.float32
        assert self.planned is not None
        assert scale == self.planned["sm_scale"]
        self.attend(given["q"], given["paged_kv_cache"], given["out"], sink)


class StandInMetadata:
    """What a plan of latents is given. Its fields are the arguments of csr()."""

    def __init__(self, given: Bound) -> None:
        self.given = given

    @classmethod
    def csr(cls, *args: Any, **kwargs: Any) -> StandInMetadata:
        return cls(dict(signature("MLAPlanMetadata", "csr").bind(*args, **kwargs).arguments))


class StandInLatent(_StandIn):
    """FlashInfer warns of tensors that are given one by one, and a plan is for packed ones by default."""

    name = "BatchMLAPagedAttentionWrapper"
    on_device = "kv_indices"
    buffers: ClassVar = {
        "qo_indptr": "qo_indptr",
        "kv_indptr": "kv_indptr",
        "kv_indices": "kv_indices",
        "kv_len_arr": "kv_len_arr",
    }

    def _bind(self, method: str, args: tuple[Any, ...], kwargs: Bound) -> Bound:
        assert not args or method == "__init__", "FlashInfer warns of positional arguments"
        given = super()._bind(method, args, kwargs)
        if method != "plan":
            return given
        assert not given.keys() & self.buffers.keys(), "FlashInfer warns of metadata that is not an object"
        assert (given.pop("query_layout"), given.pop("kv_cache_layout")) == ("split", "split")
        metadata = given.pop("metadata")
        assert isinstance(metadata, StandInMetadata)
        return given | metadata.given

    def run(self, *args: Any, **kwargs: Any) -> None:
        given, plan = self._bind("run", args, kwargs), self.planned
        assert plan is not None, "run() before plan()"
        has_sums = plan["lse_mode"] == "basee"
        sums = {"lse", "return_lse", "return_lse_base_on_e"} if has_sums else set()
        assert given.keys() == {"query", "kv_cache", "out", *sums}, "FlashInfer warns of tensors one by one"
        assert all(given[name] for name in sums - {"lse"})
        out = given["out"]
        (q, q_rope), (ckv, kpe) = given["query"], given["kv_cache"]
        assert q.is_contiguous()
        assert q_rope.is_contiguous()
        assert q.shape[1:] == (plan["num_heads"], plan["head_dim_ckv"])
        assert ckv.shape[1:] == (plan["page_size"], plan["head_dim_ckv"])
        assert kpe.shape[1:] == (plan["page_size"], plan["head_dim_kpe"])
        assert {t.dtype for t in (q, q_rope)} == {plan["q_data_type"]}
        assert {t.dtype for t in (ckv, kpe)} == {plan["kv_data_type"]}
        if isinstance(q, FakeTensor):
            _touch(out, q, q_rope, ckv, kpe, *self.read.values())
            if has_sums:
                _touch(given["lse"], q)
            return
        q_starts, kv_starts, pages, lengths = self._lists()
        for i, length in enumerate(lengths):
            of_sequence = pages[kv_starts[i] : kv_starts[i + 1]]
            latents, ropes = (side[of_sequence].flatten(0, 1)[:length] for side in (ckv, kpe))
            start, end = q_starts[i], q_starts[i + 1]
            for token in range(start, end):
                seen = length - end + token + 1
                scores = q[token] @ latents[:seen].T + q_rope[token] @ ropes[:seen].T
                out[token] = (scores * plan["sm_scale"]).softmax(-1) @ latents[:seen]
                if has_sums:
                    given["lse"][token] = (scores * plan["sm_scale"]).logsumexp(-1)


def _bound(name: str, args: tuple[Any, ...], kwargs: Bound) -> Bound:
    return dict(function_signature(name).bind(*args, **kwargs).arguments)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def rmsnorm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """[T, hidden], or [T, heads, head_dim] whose last dimension is contiguous."""
    given = _bound("rmsnorm", args, kwargs)
    assert given["input"].stride(-1) == 1
    out: torch.Tensor = given.get("out", torch.empty_like(given["input"]))
    return out.copy_(_normed(given["input"], given["weight"], given["eps"]))


def gemma_rmsnorm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """[T, hidden]; the weight counts from 1."""
    given = _bound("gemma_rmsnorm", args, kwargs)
    assert given["input"].ndim == 2
    assert given["input"].stride(-1) == 1
    return _normed(given["input"], given["weight"].float() + 1, given["eps"])


def fused_add_rmsnorm(*args: Any, **kwargs: Any) -> None:
    """In place: the residual gets the sum, the input its norm."""
    _add_normed(_bound("fused_add_rmsnorm", args, kwargs), 0.0)


def gemma_fused_add_rmsnorm(*args: Any, **kwargs: Any) -> None:
    """The same; the weight counts from 1."""
    _add_normed(_bound("gemma_fused_add_rmsnorm", args, kwargs), 1.0)


def _add_normed(given: Bound, more: float) -> None:
    x, residual = given["input"], given["residual"]
    assert x.ndim == residual.ndim == 2
    assert x.is_contiguous()
    total = x.float() + residual.float()
    residual.copy_(total.to(residual.dtype))
    x.copy_(_normed(total, given["weight"].float() + more, given["eps"]).to(x.dtype))


def silu_and_mul(*args: Any, **kwargs: Any) -> torch.Tensor:
    """[..., 2 x width] -> [..., width]."""
    given = _bound("silu_and_mul", args, kwargs)
    gate, up = given["input"].float().chunk(2, dim=-1)
    result: torch.Tensor = (torch.nn.functional.silu(gate) * up).to(given["input"].dtype)
    return result


def gelu_tanh_and_mul(*args: Any, **kwargs: Any) -> torch.Tensor:
    """[..., 2 x width] -> [..., width]."""
    given = _bound("gelu_tanh_and_mul", args, kwargs)
    gate, up = given["input"].float().chunk(2, dim=-1)
    result: torch.Tensor = (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(given["input"].dtype)
    return result


def apply_rope(*args: Any, **kwargs: Any) -> None:
    """In place; the two halves of a head are rotated together, or its neighbouring values, or of as many of
    its first values as the cache has angles for."""
    given = _bound("apply_rope_with_cos_sin_cache_inplace", args, kwargs)
    assert given["cos_sin_cache"].dtype == torch.float32
    assert given["positions"].dtype in (torch.int32, torch.int64)
    assert given["positions"].is_contiguous()
    cos, sin = given["cos_sin_cache"][given["positions"]][:, None].chunk(2, dim=-1)
    for packed in (given["query"], given["key"]):
        heads = packed.view(len(packed), -1, given["head_size"])
        rotated = heads[..., : given["cos_sin_cache"].shape[1]]
        values, halves = rotated.float(), given.get("is_neox", True)
        first, second = values.chunk(2, dim=-1) if halves else (values[..., ::2], values[..., 1::2])
        turned = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)
        rotated.copy_(joined.to(heads.dtype))


def _touch(out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Operators over all of them: a dry run then sees where each one is."""
    for one in inputs:
        out.add_(one.flatten()[:1].sum().to(out.dtype))


def capturing() -> bool:
    """Whether a graph is being recorded. A dry run replaces this."""
    return False


def flashinfer_module() -> tuple[Any, Any]:
    """A module to stand for `flashinfer`, and one for `flashinfer.mla`."""
    package: Any = types.ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = StandInPrefill
    package.BatchAttentionWithAttentionSinkWrapper = StandInSinks
    package.rmsnorm, package.fused_add_rmsnorm = rmsnorm, fused_add_rmsnorm
    package.gemma_rmsnorm, package.gelu_tanh_and_mul = gemma_rmsnorm, gelu_tanh_and_mul
    package.gemma_fused_add_rmsnorm = gemma_fused_add_rmsnorm
    package.silu_and_mul, package.apply_rope_with_cos_sin_cache_inplace = silu_and_mul, apply_rope
    package.mla = types.ModuleType("flashinfer.mla")
    package.mla.BatchMLAPagedAttentionWrapper = StandInLatent
    package.mla.MLAPlanMetadata = StandInMetadata
    return package, package.mla


def open_flashinfer(path: Path, page_size: int, num_pages: int, **options: Any) -> tuple[ModelRunner, Any]:
    """`open_pools` with FlashInfer's backends over every group that attends. FlashInfer itself does not run
    on a CPU or in float32, so no option gives this."""
    config = EngineConfig(str(path), dtype="float32", attention="torch", linear="torch", **options)
    loaded = load_model(config)
    pools = pools_of(loaded, page_size, num_pages)
    runner = ModelRunner(loaded, pools, config)
    runner.forward.attention = flashinfer_layers(loaded, pools)
    return runner, pools


def flashinfer_layers(loaded: LoadedModel, pools: Mapping[str, Any]) -> PagedLayers:
    """FlashInfer's backends, built as engine/backends/choose.py does."""
    built: dict[str, Any] = {}
    tail: dict[str, Any] = {}
    for group in loaded.spec.groups:
        facts = [layer for layer in loaded.attention if layer.kv_layer in group.layer_ids]
        if not facts or group.kind == "state" or isinstance(pools[group.name], EntryKVCache):
            continue
        first, pool = facts[0], pools[group.name]
        if group.kind == "latent":
            heads, scale, choice = first.query_heads, first.scale, first.choice
            built["latent"] = (
                FlashInferLatentAttention(pool, heads, scale, has_sinks=first.sinks)
                if choice is None
                else FlashInferSparseAttention(pool, heads, scale, choice, has_sinks=first.sinks)
            )
        elif isinstance(pool, IndexedKVCache):
            blocks = next(layer.blocks for layer in facts if layer.blocks is not None)
            built["full"] = FlashInferBlockAttention(pool, first.query_heads, first.scale, blocks)
        else:
            sinks = any(layer.sinks for layer in facts)
            built[group.kind] = FlashInferAttention(
                pool, first.query_heads, first.scale, sinks, first.softcap
            )
            if any(layer.shares is not None for layer in facts):
                workspace = built[group.kind].workspace
                tail[group.kind] = FlashInferAttention(
                    pool, first.query_heads, first.scale, sinks, first.softcap, workspace
                )
    compressed = None
    if isinstance(entries := pools[loaded.spec.groups[0].name], EntryKVCache):
        compressions = {layer.compression for layer in loaded.attention if layer.compression is not None}
        scale = loaded.attention[0].scale
        compressed = TritonCompressedAttention(entries, pools["window"], scale, compressions)
    return layers_over(loaded, pools, built, built.get("latent"), tail, compressed)
